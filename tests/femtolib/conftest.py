"""Trained weights without a hub: the model that the glassllm package carries, as a Hugging Face directory."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def glassllm_directory(tmp_path_factory) -> Path:
    """A trained Llama of 0.85 M parameters (tied, 4 heads over 2 key-value heads, 1,024 ids, 128 positions)."""
    with (resources.files("glassllm") / "weights" / "en.npz").open("rb") as file:
        arrays = dict(np.load(file, allow_pickle=False))
    config = json.loads(str(arrays.pop("__config__")))
    head_dim = config["d_model"] // config["n_heads"]
    # glassllm turns neighbouring elements of a head, Hugging Face files pair element i with i + head_dim / 2.
    halves = np.r_[0:head_dim:2, 1:head_dim:2]

    def rows_in_halves(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(-1, head_dim, matrix.shape[1])[:, halves].reshape(matrix.shape)

    names = {
        "norm1.gamma": "input_layernorm",
        "attn.W_Q": "self_attn.q_proj",
        "attn.W_K": "self_attn.k_proj",
        "attn.W_V": "self_attn.v_proj",
        "attn.W_O": "self_attn.o_proj",
        "norm2.gamma": "post_attention_layernorm",
        "ffn.W1": "mlp.gate_proj",
        "ffn.W3": "mlp.up_proj",
        "ffn.W2": "mlp.down_proj",
    }
    tensors = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for layer in range(config["n_layers"]):
        for theirs, ours in names.items():
            array = arrays[f"blocks.{layer}.{theirs}"].T  # [in, out] → [out, in]
            tensors[f"model.layers.{layer}.{ours}.weight"] = rows_in_halves(array) if theirs[-1] in "QK" else array
    directory = tmp_path_factory.mktemp("glassllm")
    tensors = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "max_position_embeddings": config["max_len"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    (directory / "config.json").write_text(json.dumps(keys))
    return directory
