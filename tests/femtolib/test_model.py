"""The decoder against transformers, which is an independent implementation of the same family."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from femtolib.model import Decoder, rotary_tables
from femtolib.model_config import ModelConfig, read_model_config
from femtolib.weights import initialize_weights, load_weights, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "grouped heads": {},
    "one key-value head a head": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "theta and eps of Llama 3": {"rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    "head_dim of its own": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    # transformers#25199, nanotron#188: a rotary base or layout that was not read shows after a few tokens only
    "all of it": {"rope_theta": 500000.0, "rms_norm_eps": 1e-6, "head_dim": 32, "rope_scaling": LLAMA3},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def config(request, tiny_llama) -> ModelConfig:
    return ModelConfig.from_dict(tiny_llama | request.param, "", inline=True)


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(320, (2, 128), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Weights so large that attention is sharp and a wrong rotation or bias shows."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)


def random_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config, dtype)
    randomize(model)
    return model


@torch.no_grad()
def test_transformers_loads_what_femto_saves_with_equal_logits(config, input_ids, tmp_path):
    model = random_decoder(config)
    tensors = model.named_parameters()
    save_model(tmp_path / "model", config, tensors, dtype=torch.float32, max_shard_bytes=10**9)
    reference, report = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(model(input_ids), reference(input_ids).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_femto_loads_what_transformers_saves_with_equal_logits(config, input_ids, tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**config.to_dict(), attn_implementation="eager"))
    randomize(reference)
    reference.save_pretrained(tmp_path)
    read = read_model_config(tmp_path)
    assert read.rope_scaling == config.rope_scaling
    model = Decoder(read, torch.float32)
    load_weights(model, tmp_path)
    expected = reference(input_ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(input_ids), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_another_rotary_base_would_be_noticed(tiny_llama, input_ids):
    logits = [
        random_decoder(ModelConfig.from_dict(tiny_llama | {"rope_theta": theta}, "", inline=True))(input_ids)
        for theta in (10000.0, 10100.0)
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@torch.no_grad()
def test_trained_weights_give_the_logits_of_two_other_implementations(glassllm_directory):
    import glassllm

    model = Decoder(read_model_config(glassllm_directory), torch.float32)
    load_weights(model, glassllm_directory)
    numpy_model, tokenizer = glassllm.load_pretrained("en")
    text = "Once upon a time there was a whale, and the people of the town went down to the sea to look at it. " * 4
    ids = torch.tensor([tokenizer.encode(text)[:128]])
    assert ids.shape == (1, 128)
    logits = model(ids)
    transformers_model = LlamaForCausalLM.from_pretrained(glassllm_directory)
    torch.testing.assert_close(logits, transformers_model(ids).logits, atol=1e-5, rtol=0)
    np.testing.assert_allclose(logits, numpy_model.forward(ids.numpy()).data, atol=2e-5, rtol=0)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert loss < 6.0, "trained weights predict text better than chance, which is ln 1024 = 6.9"


@torch.no_grad()
def test_position_ids_turn_the_rotary_embeddings(tiny_llama, input_ids):
    config = ModelConfig.from_dict(tiny_llama | {"max_position_embeddings": 1024}, "", inline=True)
    model, reference = random_decoder(config), LlamaForCausalLM(LlamaConfig(**config.to_dict()))
    reference.load_state_dict(model.state_dict())
    steps = torch.randint(0, 4, (2, 128), generator=torch.Generator().manual_seed(2))
    positions = steps.cumsum(1)
    # Without a mask transformers would read jumps in the positions as borders of documents.
    expected = reference(input_ids, position_ids=positions, attention_mask=torch.ones_like(positions)).logits
    torch.testing.assert_close(model(input_ids, positions), expected, atol=1e-5, rtol=0)
    assert (model(input_ids, positions) - model(input_ids)).abs().max() > 1e-2
    assert torch.equal(model(input_ids, torch.arange(128).expand(2, -1)), model(input_ids))


def test_gradients_equal_those_of_transformers_in_float64(config, input_ids, monkeypatch):
    def norm_in_float64(self, x):  # transformers' own goes through float32 whatever the dtype
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm_in_float64)
    model = random_decoder(config, torch.float64).double()
    reference = LlamaForCausalLM(LlamaConfig(**config.to_dict())).double()
    reference.load_state_dict(model.state_dict())
    logits, expected = model(input_ids), reference(input_ids).logits
    assert logits.dtype == torch.float64
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), input_ids.roll(-1).flatten()).backward()
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        scale = theirs[name].grad.abs().max()
        torch.testing.assert_close(parameter.grad / scale, theirs[name].grad / scale, atol=1e-10, rtol=0, msg=name)


def test_computing_in_bfloat16_leaves_weights_and_gradients_in_float32(config, input_ids):
    exact, model = random_decoder(config), random_decoder(config, torch.bfloat16)
    logits = model(input_ids)
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    expected = exact(input_ids)
    assert 0 < (logits - expected).std() / expected.std() < 0.1


def test_rotary_tables_are_computed_in_float32_whatever_the_dtype(tiny_llama):
    config = ModelConfig.from_dict(tiny_llama, "", inline=True)
    positions = torch.arange(100_000, 100_128)[None]
    exact = rotary_tables(config, positions, torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        for table, float32_table in zip(rotary_tables(config, positions, dtype), exact, strict=True):
            assert torch.equal(table, float32_table.to(dtype))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_the_meta_device_is_whole_once_weights_are_in(tiny_llama, input_ids, tied):
    # LlamaFactory#10820, transformers#36577: rotary tables left as whatever the memory held
    config = ModelConfig.from_dict(tiny_llama | {"tie_word_embeddings": tied}, "", inline=True)
    with torch.device("meta"):
        model = Decoder(config, torch.float32)
    assert not list(model.buffers())
    dirt = [torch.full((1 << k,), 1e9) for k in range(8, 20)]
    del dirt
    model.to_empty(device="cpu")
    model.tie_weights()
    initialize_weights(model, 0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    direct = Decoder(config, torch.float32)
    initialize_weights(direct, 0)
    assert torch.equal(model(input_ids), direct(input_ids))
