"""The config of a decoder, which is the config.json of a Hugging Face directory.

Both spellings, of transformers 4 and 5, are read and written. Every fault is found at once, and what a config.json asks
for and the decoder lacks is refused by name: a model that loads is the model that the file describes. Needs no torch.
"""

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from femtolib.config import show
from femtolib.errors import FemtoError


@dataclass(frozen=True)
class ModelConfig:
    """What a config.json says of a decoder; the defaults are those of transformers' Llama.

    `rope_scaling` is None for plain rotary embeddings, else {"rope_type": "linear" or "llama3", …}. `extra` holds keys
    of a config.json on disk that do not concern the computation; `to_dict` writes them back.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str, inline: bool) -> "ModelConfig":
        """Check the keys of a config.json; raises FemtoError with one line a fault, each opened by `where` if given.

        `inline`: the keys stand in a training config. There an unknown one is refused, and token ids are unset unless
        given (they are the tokenizer's to say). On disk unknown keys are carried along, with one notice. A key that
        would change the computation is refused in both.
        """
        prefix = f"{where}: " if where else ""
        if values.get("model_type") != "llama":
            raise FemtoError(f"{prefix}model_type: should be llama, got {show(values.get('model_type'))}")
        faults: list[str] = []

        def read(key: str, accepts: Callable[[Any], bool], wanted: str) -> Any:
            value = values.get(key, _DEFAULTS[key])
            if accepts(value):
                return value
            faults.append(f"{key}: should be {wanted}, got {show(value)}")
            return None

        def size(key: str) -> int | None:
            return read(key, _is_size, "a whole number of at least 1 (below 2**31)")

        found: dict[str, Any] = {key: size(key) for key in _SIZES}
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            found[key] = read(key, lambda value: isinstance(value, bool), "true or false")
        for key in ("rms_norm_eps", "initializer_range"):
            value = read(key, lambda value: _is_number(value) and value > 0, "above 0")
            found[key] = value and float(value)  # transformers refuses a 1 where it wants a 1.0
        for key, accepts, wanted in (
            ("bos_token_id", _is_token_id, "a token id or null"),
            ("eos_token_id", _is_token_id_or_list, "a token id, a list of them or null"),
            ("pad_token_id", _is_token_id, "a token id or null"),
        ):
            found[key] = read(key, accepts, wanted) if key in values or not inline else None

            ids = found[key] if isinstance(found[key], list) else [found[key]]
            rows = found["vocab_size"]
            if inline and rows and not all(token_id is None or 0 <= token_id < rows for token_id in ids):
                faults.append(f"{key}: should be below vocab_size ({rows}), got {show(found[key])}")

        width, heads = found["hidden_size"], found["num_attention_heads"]
        sharing = found["num_key_value_heads"] = (
            heads if values.get("num_key_value_heads") is None else size("num_key_value_heads")
        )
        if width and heads and width % heads:
            faults.append(f"hidden_size: should be a multiple of num_attention_heads ({heads}), got {width}")
        if heads and sharing and heads % sharing:
            faults.append(f"num_attention_heads: should be a multiple of num_key_value_heads ({sharing}), got {heads}")
        if values.get("head_dim") is not None:
            found["head_dim"] = size("head_dim")
        else:
            found["head_dim"] = width and heads and width // heads
        if found["head_dim"] and found["head_dim"] % 2:
            faults.append(f"head_dim: should be even (rotary embeddings turn pairs), got {found['head_dim']}")
        found["rope_theta"], found["rope_scaling"] = _read_rope(values, found["max_position_embeddings"], faults)

        for key, value in values.items():
            if not _is_neutral(key, value):
                faults.append(f"{key}: {show(value)} changes the computation in a way that this decoder does not know")
        if values.get("architectures") not in (None, ["LlamaForCausalLM"]):
            faults.append(f'architectures: should be ["LlamaForCausalLM"], got {show(values["architectures"])}')
        known = {"model_type", *found, *_REWRITTEN, *_NEUTRAL, *_BOOKKEEPING}
        unknown = [key for key in values if key not in known]
        if inline:
            faults += [f"unknown key {key!r}{_nearest(key, found)}" for key in unknown]
        if faults:
            raise FemtoError(*(prefix + fault for fault in faults))
        if unknown:
            print(f"notice: {prefix}carried along, without effect here: {', '.join(unknown)}", file=sys.stderr)
        extra = {k: v for k, v in values.items() if k not in found and k not in ("model_type", *_REWRITTEN)}
        return cls(model_type="llama", **found, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """A config.json in the spellings of both transformers 4 and 5; all but the dtype of the weights beside it."""
        keys = dataclasses.asdict(self)
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "rope_parameters": rope,
            **keys.pop("extra"),
            **keys,
        }


def read_model_config(directory: Path) -> ModelConfig:
    """The config.json of a Hugging Face directory; raises FemtoError."""
    path = directory / "config.json"
    return ModelConfig.from_dict(read_json_object(path), str(path), inline=False)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; raises FemtoError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FemtoError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FemtoError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FemtoError(f"{path}: should hold an object of keys and values, got {show(values)}")
    return values


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations that a trained token costs, forward and backward.

    Six a matrix weight, and attention as if it were not causal (PaLM, arXiv 2204.02311, appendix B), so that figures
    compare with others'.
    """
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.hidden_size * config.vocab_size
    return 6 * weights + 12 * config.num_hidden_layers * queries * seq_len


# ── What a config.json may hold ───────────────────────────────────────────────────────────────────────────────────────

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# Written anew by `to_dict` or by who saves the weights.
_REWRITTEN = ("architectures", "hidden_act", "rope_parameters", "dtype", "torch_dtype")
# Keys that would change the computation, each with the value at which (null aside) it does not.
_NEUTRAL = {
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "is_causal": True,
    "rope_interleaved": False,
    "original_max_position_embeddings": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "no_rope_layers": None,
    "per_layer_config": None,
    "qkv_bias": False,
    "qk_norm": False,
    "use_qk_norm": False,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "logits_scaling": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_local_experts": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": None,
    "compression_config": None,
    "auto_map": None,
}
# Keys that do not concern the computation and are too common for a notice.
_BOOKKEEPING = ("_name_or_path", "transformers_version", "use_cache")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token_id(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_token_id_or_list(value: Any) -> bool:
    return bool(value) and all(map(_is_token_id, value)) if isinstance(value, list) else _is_token_id(value)


def _is_neutral(key: str, value: Any) -> bool:
    if key in _NEUTRAL:
        return value is None or value == _NEUTRAL[key]
    return not value or not ("dropout" in key or key.endswith("pdrop"))


def _nearest(key: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(key, [*known, "model_type", "rope_parameters"], 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _read_rope(
    values: dict[str, Any], max_positions: int | None, faults: list[str]
) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling, from the two keys of transformers 4, the one of 5, or all where they agree."""
    sections = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(key), dict):
            sections[key] = values[key]
        elif values.get(key) is not None:
            faults.append(f"{key}: should be a section of keys, got {show(values[key])}")
    scalings = [_read_scaling(key, section, max_positions, faults) for key, section in sections.items()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        faults.append("rope_scaling and rope_parameters disagree: remove one of them")
    thetas = [section["rope_theta"] for section in (values, *sections.values()) if "rope_theta" in section]
    theta = thetas[0] if thetas else _DEFAULTS["rope_theta"]
    if any(other != theta for other in thetas):
        faults.append(f"rope_theta: given as {' and as '.join(map(show, thetas))}: remove all but one")
    elif not _is_number(theta) or theta <= 0:
        faults.append(f"rope_theta: should be above 0, got {show(theta)}")
    return theta, next((scaling for scaling in scalings if scaling), None)


def _read_scaling(
    key: str, section: dict[str, Any], max_positions: int | None, faults: list[str]
) -> dict[str, Any] | None:
    """What one spelling says of rope scaling: None where it is the default kind, or at fault."""
    kind = section.get("rope_type", section.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS or section.get("type", kind) != kind:
        faults.append(f"{key}: rope_type should be one of {', '.join(_ROPE_KEYS)}, got {show(section)}")
        return None
    scaling = {name: value for name, value in section.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "llama3" and max_positions:
        scaling.setdefault("original_max_position_embeddings", max_positions)
    before = len(faults)
    faults += [f"{key}: unknown key {name!r} for rope_type {kind}" for name in scaling if name not in _ROPE_KEYS[kind]]
    for name in _ROPE_KEYS[kind]:
        value = scaling.get(name)
        if not _is_number(value) or value <= 0:
            faults.append(f"{key}.{name}: should be above 0, got {show(value)}")
    if len(faults) > before:
        return None
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        faults.append(f"{key}.high_freq_factor: should be above low_freq_factor, got {show(section)}")
    return {"rope_type": kind, **scaling} if kind != "default" else None
