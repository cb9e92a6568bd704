import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig

from femtolib.errors import FemtoError
from femtolib.model import Decoder
from femtolib.model_config import ModelConfig, flops_per_token, read_model_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def faults_of(values: dict, inline: bool = True) -> list[str]:
    with pytest.raises(FemtoError) as caught:
        ModelConfig.from_dict(values, "model", inline=inline)
    return caught.value.faults


def test_every_fault_is_told_at_once_with_key_value_and_wish(tiny_llama):
    wrong = {
        "vocab_size": 0,
        "hidden_size": "64",
        "num_hidden_layers": 2.0,
        "num_attention_heads": True,
        "tie_word_embeddings": "yes",
        "rms_norm_eps": float("nan"),
        "eos_token_id": [1, "2"],
        "rope_theta": -1,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "num_layers": 3,
        "attention_dropout": 0.1,
    }
    faults = faults_of(tiny_llama | wrong)
    assert len(faults) == len(wrong)
    for key, value in wrong.items():
        [fault] = [fault for fault in faults if key in fault.split(",")[0].split(";")[0]]
        assert fault.startswith("model: ")
        assert key == "num_layers" or str(json.dumps(value))[:8] in fault


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 66}, "multiple of num_attention_heads (4), got 66"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads (3), got 4"),
        ({"head_dim": 15}, "should be even"),
        ({"hidden_size": 12}, "should be even (rotary embeddings turn pairs), got 3"),
        ({"model_type": "mistral"}, 'should be llama, got "mistral"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type should be one of default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: should be above 0, got null"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "unknown key 'beta'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "should be above low_freq_factor"),
        ({"rope_scaling": [1]}, "should be a section of keys"),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}}, "disagree"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "given as 10000.0 and as 500000.0"),
    ],
)
def test_what_cannot_be_built_is_refused(tiny_llama, change, expected):
    [fault] = faults_of(tiny_llama | change)
    assert expected in fault


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("pretraining_tp", 2),
        ("attention_dropout", 0.1),
        ("resid_pdrop", 0.1),
        ("some_dropout", 0.1),
        ("is_causal", False),
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_local_experts", 8),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(tiny_llama, key, value, inline):
    faults = faults_of(tiny_llama | {key: value}, inline)
    assert any(fault.startswith(f"model: {key}: {json.dumps(value)} changes the computation") for fault in faults)


def test_an_unknown_inline_key_is_refused_with_the_nearest_right_one(tiny_llama):
    [fault] = faults_of(tiny_llama | {"num_hiden_layers": 3})
    assert fault == "model: unknown key 'num_hiden_layers'; did you mean 'num_hidden_layers'?"


def test_unknown_keys_on_disk_are_carried_along_with_one_notice(tiny_llama, capsys):
    odd = {"transformers_version": "4.31.0", "my_note": [1, {"a": None}], "other": 2, "attention_dropout": 0.0}
    config = ModelConfig.from_dict(tiny_llama | odd, "d/config.json", inline=False)
    assert capsys.readouterr().err == "notice: d/config.json: carried along, without effect here: my_note, other\n"
    assert config.to_dict() | odd == config.to_dict()


def test_missing_keys_take_the_defaults_of_transformers():
    ours, theirs = ModelConfig.from_dict({"model_type": "llama"}, "", inline=False).to_dict(), LlamaConfig().to_dict()
    shared = ours.keys() & theirs.keys() - {"architectures"}
    assert len(shared) > 15
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


def test_token_ids_of_an_inline_config_are_unset_unless_given(tiny_llama):
    assert ModelConfig.from_dict(tiny_llama, "", inline=True).eos_token_id is None
    assert ModelConfig.from_dict(tiny_llama | {"eos_token_id": 7}, "", inline=True).eos_token_id == 7
    assert ModelConfig.from_dict(tiny_llama, "", inline=False).eos_token_id == 2
    assert ModelConfig.from_dict(tiny_llama | {"eos_token_id": [5, 7]}, "", inline=False).eos_token_id == [5, 7]


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_the_rope_spellings_of_transformers_4_and_5_mean_the_same(tiny_llama, kind):
    scaling = {"default": {}, "linear": {"rope_type": "linear", "factor": 2.0}, "llama3": LLAMA3}[kind]
    plain = {key: value for key, value in tiny_llama.items() if key != "rope_theta"}
    old = plain | {"rope_theta": 5e5, "rope_scaling": scaling or None}
    oldest = plain | {"rope_theta": 5e5, "rope_scaling": {"type": kind} | {**scaling, "rope_type": kind}}
    new = plain | {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | scaling}
    both = old | new
    configs = [ModelConfig.from_dict(values, "", inline=True) for values in (old, oldest, new, both)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].rope_theta == 5e5
    assert configs[0].rope_scaling == (scaling or None)
    written = configs[0].to_dict()
    assert ModelConfig.from_dict({**written, "rope_parameters": None}, "", inline=False) == configs[0]
    del written["rope_theta"], written["rope_scaling"]
    theirs = LlamaConfig(**written)
    assert theirs.rope_parameters == {"rope_type": kind, "rope_theta": 5e5} | scaling
    assert ModelConfig.from_dict(configs[0].to_dict(), "", inline=False) == configs[0]


def test_llama3_scaling_without_an_original_length_takes_max_position_embeddings(tiny_llama):
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    config = ModelConfig.from_dict(tiny_llama | {"rope_scaling": scaling}, "", inline=True)
    theirs = LlamaConfig(**tiny_llama, rope_scaling=scaling).rope_parameters
    assert config.rope_scaling == {key: value for key, value in theirs.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot be read"), (b"{", "not JSON"), (b"[1]", "should hold an object"), (b"\xff\xfe", "not JSON")],
)
def test_an_unreadable_config_json_is_named(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FemtoError, match=expected) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_counted_from_the_matrices(tiny_llama, tied):
    config = ModelConfig.from_dict(tiny_llama | {"head_dim": 32, "tie_word_embeddings": tied}, "", inline=True)
    parameters = dict(Decoder(config, torch.float32).named_parameters())
    layers = sum(p.numel() for name, p in parameters.items() if p.ndim == 2 and "layers" in name)
    assert flops_per_token(config, 100) == 6 * (layers + 320 * 64) + 12 * 2 * (4 * 32) * 100


def test_reading_a_config_does_not_import_torch():
    code = "import sys, femtolib.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
