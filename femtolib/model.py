"""The decoder that serves the families of model_config.py.

Modules bear the names that Hugging Face files use and rotary pairs lie in those files' order, so a checkpoint needs no
conversion in either direction. There are no buffers: rotary tables come from position ids in each forward pass, so
nothing can be left uninitialised when a model made on the meta device becomes real. Initial weights and files are in
weights.py, the loss is in loss.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from femtolib.attention import Attend, causal_attention
from femtolib.model_config import ModelConfig


class Decoder(nn.Module):
    """A Llama-style decoder that computes in `dtype`, whatever dtype its parameters are stored in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Layers(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attend: Attend = causal_attention,
    ) -> torch.Tensor:
        """Logits [batch, sequence, vocabulary] in the compute dtype, of `input_ids` [batch, sequence].

        `position_ids` [batch, sequence] turn the rotary embeddings; without them a row counts from 0. `attend` says
        which positions see which (attention.py).
        """
        return self.lm_head(self.model(input_ids, position_ids, attend, self.dtype))

    def tie_weights(self) -> None:
        """Where the config ties them, make head and embedding one parameter: again after `to_empty` has parted them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


class Layers(nn.Module):
    """All of the decoder but its head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, attend: Attend, dtype: torch.dtype
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # [1, sequence]
        cos, sin = rotary_tables(self.config, position_ids, dtype)
        x = self.embed_tokens(input_ids).to(dtype)  # [batch, sequence, hidden]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Attention in which several query heads may share one key and value head (arXiv 2305.13245)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = Linear(queries, config.hidden_size, config.attention_bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        # The number of heads is read off the projections' output: under tensor parallelism a rank has some of them.
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))  # [batch, sequence, heads, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Turned before the heads move forward, while memory is in order: saves 3 % of attention's CPU time.
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# Parameters keep the dtype they are stored and optimized in; each is cast at use to the dtype of the activations.
# So float32 weights with bfloat16 arithmetic need no autocast, and stay right when activations are recomputed, layers
# compiled or parameters sharded.


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# ── Rotary embeddings (arXiv 2104.09864) ──────────────────────────────────────────────────────────────────────────────


def rotary_tables(
    config: ModelConfig, position_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [batch, sequence, 1, head_dim / 2]; made in float32 whatever the dtype, as in transformers."""
    angles = position_ids[..., None].float() * rotary_frequencies(config, position_ids.device)
    return angles.cos().to(dtype).unsqueeze(2), angles.sin().to(dtype).unsqueeze(2)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Radians that each pair turns from one position to the next: float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slowed
    # llama3: pairs that turn often within the original context keep their speed, those that turn seldom are slowed,
    # those between are blended (apply_scaling in Meta's llama-models).
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return slowed * (1 - kept) + frequencies * kept


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair i, which is elements i and i + head_dim / 2 of each head in `x` [batch, sequence, heads, head_dim]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
