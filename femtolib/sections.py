"""The sections and keys of a config that recipes share. A recipe's `Config` picks from these and adds its own.

Keys keep one meaning in every recipe. A key whose feature is not built yet is here already, so that a config written
today stays valid: any value but its default is refused with that reason.
"""

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from femtolib.config import (
    BuiltinOrPath,
    ConfigModel,
    Count,
    ExistingPath,
    InputPatterns,
    Integer,
    OutputPath,
    PositiveInteger,
    ResumeFrom,
    not_built,
)
from femtolib.errors import FemtoError
from femtolib.model_config import ModelConfig

# ── Checks of one key against another ─────────────────────────────────────────────────────────────────────────────────


def _no_float16(value: Any) -> Any:
    if value == "float16":
        raise ValueError("only data_parallel_pretrain scales the loss as float16 needs it; use bfloat16")
    return value


def _only_of_a_copy(value: str, info: ValidationInfo) -> str:
    if value == "dtype" and info.data.get("dtype", "bfloat16") not in ("bfloat16", "float16"):
        raise ValueError(f"has no effect with dtype: {info.data['dtype']}")
    return value


def _fits_dtype(value: str, info: ValidationInfo) -> str:
    wanted = "float64" if info.data.get("dtype") == "float64" else "float32"
    if "dtype" in info.data and value != wanted:
        raise ValueError(f"with dtype: {info.data['dtype']} it is {wanted}")
    return value


def _needs_validation_data(value: int | None, info: ValidationInfo) -> int | None:
    if value is not None and "data" in info.data and info.data["data"].validation is None:
        raise ValueError("needs data.validation")
    return value


def _one_of_two(value: int | None, info: ValidationInfo) -> int | None:
    if "max_steps" in info.data and (value is None) == (info.data["max_steps"] is None):
        raise ValueError("set exactly one of max_steps and epochs")
    return value


# ── Single keys ───────────────────────────────────────────────────────────────────────────────────────────────────────

OutputDir = Annotated[OutputPath, Field(description="folder that the run writes: config, metrics, checkpoints, model")]
Seed = Annotated[Integer, Field(ge=0, lt=2**63, description="decides the initial weights and the order of the rows")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")]
# At most 1,024: libgomp ends the process where it cannot have its threads.
Threads = Annotated[
    Annotated[PositiveInteger, Field(le=1024)] | None,
    Field(description="CPU threads of a process (null: torch's choice)"),
]
Deterministic = Annotated[bool, Field(description="only deterministic kernels; on a GPU needed for bit-equal resume")]
ProcessGroupTimeout = Annotated[
    Annotated[PositiveInteger, Field(le=31_536_000)],  # a year: torch counts milliseconds, and not to much more
    Field(description="seconds that a rank waits for another one before the run fails"),
]
Resume = Annotated[
    ResumeFrom, Field(description="auto continues a run found in output_dir; never; must; or the path of a checkpoint")
]
ComputeDtype = Annotated[
    Literal["float32", "bfloat16", "float64"],
    BeforeValidator(_no_float16),
    Field(description="what the model computes in"),
]
ComputeDtypeOrFloat16 = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"],
    Field(description="what the model computes in (float16 with a loss scale)"),
]
AccumulateIn = Annotated[
    Literal["float32", "dtype"],
    AfterValidator(_only_of_a_copy),
    Field(description="gradients over micro-batches add up in float32, or as `dtype` says, where that is smaller"),
]
ParamDtype = Annotated[
    Literal["float32", "float64"],
    AfterValidator(_fits_dtype),
    Field(description="what weights are stored and optimized in (float64 with dtype: float64)"),
]
Tokenizer = Annotated[
    BuiltinOrPath | None,
    Field(description="HF directory, tokenizer.json or builtin (null: the token directory's own)"),
]
GlobalBatchSize = Annotated[PositiveInteger, Field(description="rows in one optimizer step, over all devices")]
MicroBatchSize = Annotated[PositiveInteger, Field(description="rows in one forward pass on one device")]
MaxSteps = Annotated[Count | None, Field(description="optimizer steps (this or epochs); 0 writes the initial model")]
Epochs = Annotated[
    PositiveInteger | None,
    AfterValidator(_one_of_two),
    Field(description="passes over the data (this or max_steps)"),
]
MaxGradNorm = Annotated[float | None, Field(gt=0, description="clip the global gradient norm to this (null: do not)")]
MaxGradValue = Annotated[
    float | None, Field(gt=0, description="after that, clip each element of the gradient to this (null: do not)")
]
Processes = Annotated[
    PositiveInteger,
    Field(le=1024, description="ranks that the recipe starts itself on this machine, where no launcher does"),
]
ValidateEvery = Annotated[
    PositiveInteger | None,
    AfterValidator(_needs_validation_data),
    Field(description="steps between validations (null: at the end)"),
]
ValidationMaxRows = Annotated[
    PositiveInteger | None,
    AfterValidator(_needs_validation_data),
    Field(description="validate on the first rows only"),
]


# ── Model and data ────────────────────────────────────────────────────────────────────────────────────────────────────


class ModelSection(ConfigModel):
    """Either the path of a Hugging Face directory, or the keys of a config.json written out here."""

    model_config = ConfigDict(extra="allow")

    path: ExistingPath | None = Field(None, description="HF directory; or write the keys of a config.json here")
    weights: Literal["load", "random"] = Field("load", description="of `path`: load them, or start from random ones")

    @model_validator(mode="after")
    def _one_way(self) -> "ModelSection":
        inline = self.inline_keys()
        if self.path is None and not inline:
            raise ValueError("give `path`, or the keys of a config.json (model_type, hidden_size, …)")
        if self.path is not None and inline:
            raise ValueError(
                f"`path` names a config.json already; remove {', '.join(map(repr, inline))} (on the command line: "
                f"'model={{path: {self.path}}}' replaces the section)"
            )
        if self.path is None and "weights" in self.model_fields_set and self.weights == "load":
            raise ValueError("`weights: load` needs `path`")
        if self.path is not None and not (self.path / "config.json").is_file():
            raise ValueError(f"no config.json in {self.path}")
        if inline:
            try:
                ModelConfig.from_dict(inline, "", inline=True)
            except FemtoError as error:
                raise ValueError(str(error)) from None
            self.weights = "random"
        return self

    def inline_keys(self) -> dict[str, Any]:
        """The config.json keys that stand in the config itself."""
        return dict(self.model_extra or {})


class DataSection(ConfigModel):
    """What to train on, and how documents become rows."""

    train: InputPatterns = Field(description="token directories or raw files (.jsonl, .txt, .parquet, …), or builtin")
    validation: InputPatterns | None = Field(None, description="the same, for validation")
    rows: Literal["stream", "packed", "padded"] = Field(
        "stream",
        description="one stream cut into rows, or one document a row (padded); packed is not built yet",
    )
    seq_len: PositiveInteger = Field(512, description="tokens in a row")
    document_mask: bool | None = Field(None, description="keep documents apart (null: false for stream, else true)")
    shuffle: bool = Field(True, description="a new order of the rows each epoch")
    tail: Literal["drop", "pad"] = Field("drop", description="an epoch's last rows short of a global batch")
    num_workers: Count = Field(0, le=256, description="processes that prepare batches (0: the main one)")
    prefetch: PositiveInteger = Field(2, le=1024, description="batches that each worker keeps ready")
    text_key: str = Field("text", min_length=1, description="raw .jsonl and .parquet: the key that holds the text")
    text_documents: Literal["line", "file"] = Field("line", description="raw .txt: what one document is")
    on_bad_document: Literal["stop", "skip"] = Field("stop", description="raw files: what a broken document does")
    too_long: Literal["truncate", "drop", "stop"] = not_built("truncate", "documents longer than a row of their own")

    @field_validator("rows")
    @classmethod
    def _rows_built(cls, value: str) -> str:
        if value == "packed":
            raise ValueError("not built yet; use stream or padded")
        return value

    def keeps_documents_apart(self) -> bool:
        return self.rows != "stream" if self.document_mask is None else self.document_mask


# ── Optimization ──────────────────────────────────────────────────────────────────────────────────────────────────────


class OptimizerSection(ConfigModel):
    name: Literal["adamw", "sgd"] = Field(
        "adamw", description="in both, weight decay is decoupled and skips 1-D weights"
    )
    lr: float = Field(3e-4, gt=0, lt=1e6, description="the highest learning rate of the schedule")
    lr_reference_batch_size: Annotated[
        PositiveInteger | None,
        Field(description="global_batch_size that lr was found for; others scale it in proportion (null: do not)"),
    ] = None
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2, description="adamw: decay of the two moments"
    )
    eps: float = Field(1e-8, gt=0, description="adamw: added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="per step and unit of learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd: decay of the momentum")

    @field_validator("betas", "eps", "momentum")
    @classmethod
    def _has_an_effect(cls, value: Any, info: ValidationInfo) -> Any:
        owner = "sgd" if info.field_name == "momentum" else "adamw"
        if value != cls.model_fields[info.field_name].default and info.data.get("name", owner) != owner:
            raise ValueError(f"goes with name: {owner} alone")
        return value


class ScheduleSection(ConfigModel):
    name: Literal["cosine", "linear", "constant", "wsd"] = Field("cosine", description="shape after the warmup")
    warmup_steps: Count = Field(0, description="steps in which the learning rate rises linearly")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the last learning rate, as a part of the highest")
    decay_steps: Annotated[PositiveInteger | None, Field(description="wsd: the last steps, with a linear decay")] = None

    @field_validator("min_lr_ratio")
    @classmethod
    def _falls(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("name") == "constant":
            raise ValueError("has no effect with name: constant")
        return value

    @field_validator("decay_steps")
    @classmethod
    def _with_wsd(cls, value: int | None, info: ValidationInfo) -> int | None:
        if "name" in info.data and (value is None) == (info.data["name"] == "wsd"):
            raise ValueError("needed with name: wsd" if value is None else "goes with name: wsd alone")
        return value


class ParallelSection(ConfigModel):
    """How many ranks share what; the product of the four sizes is the number of processes."""

    dp_replicate: PositiveInteger = Field(1, description="copies of the model, each over dp_shard ranks")
    dp_shard: Integer = Field(-1, description="ranks over which a copy's parameters lie (-1: all that are left)")
    cp: PositiveInteger = Field(1, description="ranks that share a row's tokens (context parallelism)")
    tp: PositiveInteger = Field(1, description="ranks that share each matrix (tensor parallelism)")
    defer_gradient_reduction: bool = Field(
        False, description="reduce gradients once a step instead of after each micro-batch: faster, takes more memory"
    )

    @field_validator("dp_shard")
    @classmethod
    def _all_or_some(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("should be -1 (all ranks that are left) or at least 1")
        return value


class GradientSyncSection(ConfigModel):
    """How gradients are added over the ranks; all but communication_dtype gives the same sums."""

    bucket_mb: float = Field(25, ge=0, lt=1e6, description="MiB sent together (0: each alone, as 4 MiB are anyway)")
    overlap: bool = Field(True, description="add gradients while the backward pass goes on, not after it")
    communication_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="what gradients are rounded to on their way (null: as they are)"
    )
    find_unused_parameters: bool = Field(
        False, description="a parameter that no row of a rank touched counts as zero there, instead of an error"
    )
    static_graph: bool = Field(False, description="each rank touches the same parameters in every step, or it fails")


class LossSection(ConfigModel):
    chunks: PositiveInteger = not_built(1, "pieces in which logits are made")


class CompileSection(ConfigModel):
    """What torch.compile makes faster code of, at the price of a minute or more at the start."""

    model: bool = Field(False, description="each layer (one graph for all)")
    loss: bool = Field(False, description="the loss")
    optimizer: bool = Field(False, description="the optimizer's update; adamw then corrects its bias in float32")


def activation_checkpointing() -> Any:
    return not_built("none", "recompute activations: none, full, every_N or by_operation")


def activation_offloading() -> Any:
    return not_built(False, "keep activations in the host's memory")


def optimizer_in_backward() -> Any:
    return not_built(False, "update each weight as soon as its gradient is there")


# ── Files and screen ──────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointSection(ConfigModel):
    every: PositiveInteger | None = Field(None, description="steps between checkpoints (null: at the end alone)")
    keep_last: PositiveInteger | None = Field(None, description="how many checkpoints stay (null: all)")
    async_save: bool = Field(True, description="copy the state and write it while training goes on")


class ExportSection(ConfigModel):
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        Field(description="of OUTPUT/model's weights (null: param_dtype)"),
    ] = None
    max_shard_bytes: PositiveInteger = Field(5_000_000_000, description="size of one file of weights")


class LogSection(ConfigModel):
    every: PositiveInteger = Field(10, description="steps between updates of screen, TensorBoard and W&B")
    tensorboard: bool = Field(False, description="write OUTPUT/tensorboard (needs the extra `logging`)")
    wandb_project: str | None = Field(None, description="Weights & Biases project (needs the extra `logging`)")
    samples: bool = Field(False, description="write which rows each step used to OUTPUT/samples-rankN.jsonl")
    digests: bool = Field(False, description="log digests of weights and optimizer at every step")

    @field_validator("tensorboard", "wandb_project")
    @classmethod
    def _installed(cls, value: Any, info: ValidationInfo) -> Any:
        package = info.field_name.partition("_")[0]
        if value and find_spec(package) is None:
            raise ValueError(f"{package} is not installed; pip install 'femto[logging]'")
        return value


class ProfileSection(ConfigModel):
    start: Annotated[PositiveInteger | None, Field(description="first step to trace (null: no trace)")] = None
    steps: PositiveInteger = Field(3, description="how many steps to trace into OUTPUT/profile")
