"""Compression settings. Every value is validated here and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny, ValidationError, model_validator

from rocket_core.engines import ENGINES, ROCKET, Engine, EngineName, ExportKind, Kind, NamedExport
from rocket_core.errors import InvalidConfigError
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import BudgetUnit
from rocket_core.sizes.code_format import MEMORY_GROUPS, CodeBits, CodeChoices, GroupSize
from rocket_core.sizes.memory_fit import FittedMemory, MemoryFit
from rocket_core.sizes.target import (
    MEMBERS,
    BitsPerWeight,
    ByBytes,
    ByFormat,
    ByLoss,
    ByRatio,
    LossMeasure,
    Target,
    target_of,
)

TokenWeights = Literal["gradient", "none"]
Method = Literal["rocket", "rocket-uniform", "svd-llm", "cospadi", "magnitude", "wanda", "sparsegpt", "rtn", "gptq"]
Preset = Literal["instant", "paper", "fast", "best", "max"]
Objective = Literal["weight", "whitened", "fisher", "prior"]
Storage = Literal["file", "memory"]
ValueBits = Literal[4, 8, 16]
Included = Literal["embeddings", "vision"]
Sparsification = Literal["two-stage", "per-row", "global"]
WeightMetric = Literal["frobenius", "l1", "cosine", "spectral"]
StorageDtype = Literal["auto", "float32", "float16", "bfloat16"]
Precision = Literal["float32", "float64"]
InputKind = Literal["text", "images", "audio"]
"""What a model reads."""
CalibrationKind = InputKind | Literal["text and images", "text and audio"]
"""What a model was calibrated on."""
Stage = Literal[
    "downloading",
    "preflight",
    "differentiating",
    "calibrating",
    "allocating",
    "factorizing",
    "healing",
    "exporting",
    "evaluating",
    "benchmarking",
]
"""Stages of a run, in order: `downloading` only for a model on the Hub, `differentiating` only with the objective
`fisher`, `healing`, `evaluating` and `benchmarking` only if requested. A run that only profiles ends after
`calibrating`. The healing of a finished artifact has no stages from `differentiating` to `factorizing`."""
STAGES: tuple[Stage, ...] = get_args(Stage)
_STAGE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "downloading": "fetching the files",
        "preflight": "checking the model",
        "differentiating": "measuring sensitivity",
        "calibrating": "profiling the layers",
        "allocating": "choosing what to keep",
        "factorizing": "compressing the layers",
        "healing": "healing the result",
        "exporting": "writing the files",
        "evaluating": "measuring quality",
        "benchmarking": "measuring speed",
        "uploading": "sending the files",
    }
)

HUB_DATASETS = ("wikitext2", "ptb", "alpaca", "refinedweb", "c4")
BUILTIN_DATASET = "builtin"
HUB_TASKS = (
    "arc_challenge",
    "arc_easy",
    "boolq",
    "hellaswag",
    "lambada_openai",
    "openbookqa",
    "piqa",
    "sciq",
    "winogrande",
)
# Images or audio generated from the seed. Never a default: a substitute for real data costs quality.
SYNTHETIC_DATASET = "synthetic"
PROFILE_RATIOS = tuple(round(0.05 * step, 2) for step in range(1, 15))
PROFILE_RANK_NNZ_RATIOS = tuple(round(1.0 + 0.1 * step, 1) for step in range(21))

KINDS: tuple[Kind, ...] = ROCKET.kinds
"""All kinds."""

DEFAULT_PRESET: Preset = "fast"
"""Source of the settings' own defaults: far better than `paper` in about its time, and a profile answers any ratio."""

# Algorithm 1 to the letter: at the smallest cap, without any extension of the paper.
_PAPER: Mapping[str, Any] = {
    "method": "rocket",
    "objective": "weight",
    "kinds": ("low_rank", "factored"),
    "cap_slack": 0.0,
    "importance_balance": 0.5,
    "over_sparsification": 5e-3,
    "sparsification": "two-stage",
    "metric": "frobenius",
    "sweeps": 0,
    "column_weights": False,
    "token_weights": "none",
    "sequential": False,
    "refine": False,
}
_FAST: Mapping[str, Any] = {
    "method": "rocket",
    "objective": "fisher",
    "kinds": KINDS,
    "importance_balance": 0.0,
    "sweeps": 0,
    "column_weights": True,
    "token_weights": "gradient",
    "sequential": False,
    "refine": False,
}
_BEST: Mapping[str, Any] = {**_FAST, "sweeps": 2, "sequential": True}
# From the weights alone: rounded to the nearest code, without calibration data.
_INSTANT: Mapping[str, Any] = {
    **_FAST,
    "objective": "prior",
    "kinds": ("quantized", "entropy_coded"),
    "budget": "bytes",
    "column_weights": False,
    "token_weights": "none",
}
PRESETS: Mapping[Preset, Mapping[str, Any]] = MappingProxyType(
    {"instant": _INSTANT, "paper": _PAPER, "fast": _FAST, "best": _BEST, "max": {**_BEST, "refine": True}}
)
"""Settings of each preset; a setting given explicitly overrides its preset's."""

ONE_FORMAT_METHODS: frozenset[str] = frozenset({"rtn", "gptq"})
"""Methods that store every layer in one format, which decides the size: they take no other target."""
_LOSSES: frozenset[str] = frozenset(get_args(LossMeasure))
TARGETS_IN_BYTES: frozenset[str] = frozenset({"target_bytes", "bits", "fit"}) | _LOSSES
"""Members for a target with which the budget counts bytes."""
_ONE_FORMAT_GROUPS: frozenset[GroupSize] = frozenset({0, 32, 64, 128})
_ONE_FORMAT: Mapping[str, Any] = MappingProxyType({"budget": "bytes", "code_bits": 4, "group_size": 32})

SETTINGS_NOT_IN_PROFILE = frozenset(
    {
        "ratio",
        "target_bytes",
        "bits",
        "fit",
        "max_kl",
        "max_perplexity_increase",
        "evaluate",
        "preset",
        "cap_slack",
        "export",
        "max_shard_bytes",
        "value_bits",
        "refine",
        "heal_tokens",
    }
)
"""Settings that a layer's profile does not depend on. All others do, and new settings are assumed to."""

MAX_PATTERNS = 256
MAX_PATTERN_CHARACTERS = 256
"""Limits of `ignore`: matching patterns against layer names takes time proportional to their product."""

_Config = TypeVar("_Config", bound=FrozenModel)

HealingTokens = Annotated[int, Field(ge=1, le=10**12)]
"""Tokens that healing reads."""
DEFAULT_HEALING_TOKENS = 2_000_000
"""Tokens where a command or a form is not told how many."""

# Inside the output folder, until the artifacts are complete.
WORK_FOLDER_NAME = ".rocket-work"
# In that folder: whose work it is.
RUN_NAME = "run.json"

_GIB = 2**30


class CalibrationConfig(FrozenModel):
    """The inputs from which the Gram matrices are computed."""

    dataset: str = BUILTIN_DATASET
    """for a model that reads text `builtin`, a name of `HUB_DATASETS`, `namespace/name:split` or
    `namespace/name/config:split` on the Hub, or the path of a local `.txt`, `.md`, `.jsonl`, `.json`, `.csv` or
    `.parquet` file, which may be compressed, or of a folder of `.txt` and `.md` files; for one that reads images or
    audio the path of a folder of images (`.png`, `.jpg`, `.jpeg`) or of audio (`.wav`), or `synthetic`, a substitute
    that costs quality.
    """
    column: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """column of the rows that holds the text, or a list of messages; None finds it, see
    `rocket_core.inspection.files.text_rows.row_document`. The model's chat template renders chats.
    """
    skip_bad_rows: bool = False
    """whether rows without text, and chats that the chat template refuses, are skipped and counted."""
    pack: bool = True
    """whether documents are concatenated and cut into windows; otherwise each starts a window, which holds nothing else
    and is not padded, and the rest of a longer document is left out. Windows are then run one by one.
    """
    samples: Annotated[int, Field(ge=1)] = 256
    """windows of tokens, images, or windows of audio, at least 1."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """tokens per window of text; None takes 256 or the model's context length, whichever is less. Must be None for
    images.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the choice of samples."""


class HealingConfig(FrozenModel):
    """How an artifact is healed: trained on text towards the predictions of the model that it was made from."""

    tokens: HealingTokens
    """tokens to read; text that has fewer is read again. Time and quality grow with it."""
    dataset: str = BUILTIN_DATASET
    """text to read, as `CalibrationConfig.dataset` for a model that reads text."""
    column: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """as `CalibrationConfig.column`."""
    skip_bad_rows: bool = False
    """as `CalibrationConfig.skip_bad_rows`."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """tokens per window; None takes 1024 or the model's context length, whichever is less."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the choice and the order of windows."""
    device: str = "auto"
    """torch device to train on, as `CompressionConfig.device`."""


class EvaluationConfig(FrozenModel):
    """How the dense and the compressed model are compared once the artifacts are written.

    The evaluation changes no artifact. Both models are loaded one after the other, each as a whole: unlike compression,
    which holds one block at a time, an evaluation needs memory for the whole model, and disk for the dense model's
    logits (tokens times vocabulary) while it runs.
    """

    dataset: str = BUILTIN_DATASET
    """text to predict: `builtin` (default; 36,000 characters of CPython's documentation, which is never used for
    calibration), or text named as `CalibrationConfig.dataset`. If the model is calibrated on the same dataset, the
    documents after the last calibrated one are read; otherwise the file from its beginning. The choice of dataset costs
    nothing.
    """
    samples: Annotated[int, Field(ge=1)] = 64
    """windows, at least 1; default 64, fewer if the text ends earlier. Each costs two forward passes (dense and
    compressed). An encoder reads this many sentences.
    """
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """tokens per window, the longest context; None (default) takes 1024 or the model's context length, whichever is
    less.
    """
    stride: Annotated[int, Field(ge=1)] | None = None
    """tokens from the start of one window to the next, at most `sequence_length`: every token is predicted once, from
    at least `sequence_length - stride` preceding tokens where the text has them. None (default) is `sequence_length`:
    no overlap, cheapest. Half of it costs twice the windows for the same text.
    """
    tasks: tuple[str, ...] = ()
    """zero-shot tasks, none by default: names of `HUB_TASKS`, which lm-evaluation-harness fetches from the Hub, or
    paths of local `.jsonl` files (see `rocket_core.evaluation.harness`). They need the extra `evaluation`, and cost a
    forward pass per choice of each item, for both models.
    """
    task_items: Annotated[int, Field(ge=1)] | None = None
    """items read from each task, from its beginning; None (default) reads all."""
    prompts: tuple[str, ...] = ()
    """texts that both models answer with the most likely token each time, none by default: the report shows the answers
    side by side, and where they part. A model with a chat template reads them as a user's message, another one
    continues them. Each costs a forward pass per token of its answer, for both models.
    """
    answer_tokens: Annotated[int, Field(ge=1)] = 64
    """tokens of the longest answer to a prompt, default 64; an answer ends earlier with the model's end of text."""

    @model_validator(mode="after")
    def _settings_agree(self) -> "EvaluationConfig":
        if self.stride is not None and self.sequence_length is not None and self.stride > self.sequence_length:
            raise ValueError("stride is larger than sequence_length, so that tokens would be left out; lower it")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError("tasks names the same task twice; name each once")
        return self


def _is_fraction(value: Any) -> Any:
    # 2 % is easily written as 2.
    if isinstance(value, int | float) and value >= 1:
        raise ValueError("should be less than 1; for 2 %, write 0.02")
    return value


Increase = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_is_fraction)]
"""A part of what the original has: above 0 and less than 1."""


class AcceptanceConfig(FrozenModel):
    """What the measured result must meet to be accepted: at least one bound.

    A run ends with a verdict on it, and keeps the result whatever the verdict is. For models that predict tokens.
    """

    max_kl: Annotated[float, Field(gt=0)] | None = None
    """most KL divergence from the original, mean over the tokens of the evaluation, in nats, above 0."""
    max_perplexity_increase: Increase | None = None
    """largest increase of the perplexity, as a fraction of that of the original, above 0 and less than 1."""
    max_task_drop: Increase | None = None
    """largest drop of an accuracy (`acc` and `acc_norm`) in any of the evaluation's zero-shot tasks, as a fraction of
    all items, above 0 and less than 1: with 0.02, 48 % right instead of 50 % is accepted.
    """

    @model_validator(mode="after")
    def _has_a_bound(self) -> "AcceptanceConfig":
        if not self.model_dump(exclude_none=True):
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self


def _as_list(value: Any) -> Any:
    return value if value is None or isinstance(value, list | tuple) else (value,)


def _as_sent(values: Sequence[int]) -> int | tuple[int, ...]:
    return values[0] if len(values) == 1 else tuple(values)


# In Python always tuples. In JSON a single number is not in a list, as before several could be given.
_CodeBits = Annotated[
    tuple[CodeBits, ...],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=CodeBits | tuple[CodeBits, ...]),
    PlainSerializer(_as_sent, return_type=CodeBits | tuple[CodeBits, ...]),
]
_GroupSizes = Annotated[
    tuple[GroupSize, ...],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=GroupSize | tuple[GroupSize, ...]),
    PlainSerializer(_as_sent, return_type=GroupSize | tuple[GroupSize, ...]),
]


def _as_divided(value: Any) -> Any:
    # As a run has divided it.
    is_divided = isinstance(value, Mapping) and "cache_bytes" in value
    return FittedMemory.model_validate(value) if is_divided else value


class MethodOptions(FrozenModel):
    """How to compress: the settings that a client of the service may choose as well."""

    preset: Preset = DEFAULT_PRESET
    """values for the settings that are not given: `instant` (from the weights alone, in little more time than to read
    and write them: no calibration data, layers are quantized, ratios are of bytes), `paper` (the paper's algorithm to
    the letter), `fast` (the default: one pass of calibration, about 0.9 to 1.5 times the time of `paper`), `best` (2 to
    3.3 times that of `paper`) or `max` (`best` with `refine`, two to four times its time); see `PRESETS`. Defaults
    named below are those of `fast`. If no preset is given, methods other than `rocket` use `paper`.
    """
    method: Method = "rocket"
    """how layers are compressed: `rocket` (default), or for comparison: `rocket-uniform` (the paper's method with every
    layer at the same ratio), `svd-llm`, `magnitude`, `wanda`, `sparsegpt` (none takes more time than `paper`),
    `cospadi` (seconds to minutes for each layer), or `rtn` and `gptq`, which quantize every layer to `code_bits`
    instead of taking another target (less time than `paper`); see `rocket_core.methods`.
    """
    code_bits: _CodeBits | None = None
    """bits of a code in quantized layers: 2 to 8, or a list of them. The methods `rtn` and `gptq` take one;
    null (default) is 4. With `rocket` it is what the knapsack may choose from where the budget counts bytes; null
    (default) is all, and if given no layer is entropy coded or has factors of codes. A shorter list costs less time to
    profile.
    """
    group_size: _GroupSizes | None = None
    """inputs of an output that share a scale in quantized layers: 8, 16, 32, 64, 128, or 0 for all of an output, or a
    list of them. The methods `rtn` and `gptq` take one of 0 and 32 to 128, with 16-bit scales; null (default) is 32.
    With `rocket` it is what the knapsack may choose from, as for `code_bits`; null (default) is all but 128, and a
    size that a layer has less inputs than is 0. Smaller groups have less error and cost more bytes.
    """
    engine: EngineName = "rocket"
    """program that will run the result: `rocket` (default) is `transformers` with `rocket_core.hf`, which reads every
    kind; for `vllm`, `llama.cpp`, `mlx` and `onnx` layers are quantized in formats that they read, the budget counts
    bytes, and the artifact is one of compressed-tensors, a GGUF file, a folder for mlx-lm or a checkpoint of Olive.
    `vllm-int8`, `vllm-fp8` and `vllm-nvfp4` are vLLM with codes that processors multiply, and inputs rounded to 8 bits
    when it computes. Costs nothing.
    """
    objective: Objective = "fisher"
    """error that the knapsack sums over layers: `weight` (the paper: relative error in the original space, under a cap
    on each layer; when it is selected, the preset's shared dictionaries and column weights are disabled), `whitened`
    (squared relative error in the whitened space, no cap), `fisher` (default; expected increase of the loss in nats
    per token, no cap; costs a forward and a backward pass over `sensitivity_samples` windows; for models that do not
    predict next tokens, the change of their last hidden states) or `prior` (squared relative error of the weights, by
    what layers of its kind matter in known models; nothing is calibrated, see the preset `instant`).
    """
    budget: BudgetUnit = "parameters"
    """what the ratio is a fraction of: `parameters` (default; the paper's count; masks are free) or `bytes` (bytes of
    the compressible layers as stored, masks included). Costs nothing.
    """
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = KINDS
    """ways to store a layer that the knapsack may choose from, in addition to leaving it dense: `low_rank` (two
    factors; with `quantized` also as integer codes of 3 bits), `factored` (dictionary and sparse coefficients),
    `shared` (one dictionary for all layers that read the same input; not with the objective `weight`), `sparse` (the
    weight with many entries zero), `quantized` (integer codes of 2 to 8 bits with scales) and `entropy_coded` (integer
    codes in as many bits as their distribution needs), both only where the target counts bytes. All by default. Each is
    profiled: `sparse` and `quantized` cost about as much as calibration, the others less.
    """
    storage: Storage = "file"
    """what is to be small where the target counts bytes: the `file` (default), for which layers may be entropy coded,
    which has about three quarters of the error at equal bytes, and takes about a bit per weight more in memory on a
    CPU; or `memory`, where no layer is, and integer codes have scales for groups of 32 inputs or more, which are
    faster. Costs nothing.
    """
    value_bits: ValueBits = 16
    """bits of each number that a compressed layer keeps (coefficients, atoms, sparse weights), where the budget counts
    parameters: 16 (default) stores them in the model's dtype, 8 and 4 round them afterwards to integer codes with a
    scale of 8 bits for every 32. Layers that stay dense are not rounded. Costs little time, and error that the profile
    does not predict.
    """
    ignore: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_PATTERN_CHARACTERS)], ...], Field(max_length=MAX_PATTERNS)
    ] = ()
    """glob patterns of layer names that stay dense, none by default; each must match at least one compressible layer,
    or the token embedding or head, which the last part of their name suffices for: `lm_head`, `embed_tokens`. A tied
    one is ignored by either name. At most 256 patterns of at most 256 characters. Saves the time of each ignored layer.
    """
    include: tuple[Included, ...] | None = None
    """what is compressed in addition to the layers in the blocks of the language model: `embeddings` for the token
    embedding and the head, tied or not, which are quantized; `vision` for the layers in the blocks of the tower that
    encodes images, which needs calibration data with an image in every line; `[]` is nothing. By default, and unless
    it is `[]`, embeddings are included where the target is a size; a ratio is one of the layers in blocks, unless
    embeddings are named here. Never where the budget counts parameters. Embedding and head are profiled either way if a
    profile counts bytes, which costs about as much as one more layer in a block for each; a tower costs as much as
    blocks of a language model with as many tokens.
    """
    export: Annotated[tuple[NamedExport, ...], Field(min_length=1)] = ROCKET.exports
    """artifacts to write: `rocket` (every layer as it is stored), `dense` (stock names and shapes, as large as the
    original), or for another engine `compressed-tensors`, `gguf`, `mlx` or `olive`. By default the one that the
    engine reads; each costs disk space. Others can be made later from `rocket`.
    """
    dtype: StorageDtype = "auto"
    """dtype in which the model is stored; `auto` (default) is the checkpoint's own. It also runs in this dtype, but on
    a CPU in float32 instead of float16, and instead of bfloat16 unless the CPU multiplies bfloat16 matrices itself.
    Models that are compared run in float32 at least: while layers are compressed one after another (`sequential`) on
    any device, in an evaluation on a CPU. Costs memory and disk in proportion to its size.
    """
    precision: Precision = "float32"
    """dtype of supports and least squares, `float32` by default; `float64` is the reference that tests compare
    `float32` with, and takes at least twice the time. Eigenbases are computed in float64 either way.
    """
    importance_balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """weight λ of the original-space importance, [0, 1], default 0; costs nothing."""
    over_sparsification: Annotated[float, Field(ge=0, lt=1)] = 5e-3
    """β, fraction of the coefficients reserved for the global reactivation, [0, 1), default 5e-3; costs nothing."""
    ridge: Annotated[float, Field(gt=0, le=1e-2)] = 1e-9
    """μ relative to each coefficient row's energy, default 1e-9; costs nothing."""
    shrinkage: Annotated[float, Field(ge=0, le=1)] = 0.05
    """pull of the Gram matrix towards its diagonal, relative to d_in / tokens, default 0.05; costs nothing."""
    sparsification: Sparsification = "two-stage"
    """how the support of coefficients is chosen: `two-stage` (default, the paper's), `per-row` or `global`; all cost
    the same. For importance in the whitened space only, set `importance_balance` to 0.
    """
    metric: WeightMetric = "frobenius"
    """error measure of `weight`: `frobenius` (default), `l1`, `spectral` (relative), or `cosine` (mean over columns of
    the cosine distance). All but the first form each candidate's weight, and `spectral` also its singular values, which
    makes a profile take many times as long.
    """
    sweeps: Annotated[int, Field(ge=0, le=3)] = 0
    """number of times that support, coefficients and dictionary of each chosen layer are improved in turn, 0 (default)
    to 3; each costs about as much as the candidates of a profile.
    """
    column_weights: bool = True
    """weight the error of each output of a layer by the loss's sensitivity to it (objective `fisher`); on by default,
    and free.
    """
    token_weights: TokenWeights = "gradient"  # noqa: S105 - no password
    """how much each calibration token counts: `gradient` (default with objective `fisher`), by the gradient of the loss
    at the layers that read it, for models that predict tokens; or `none`, all the same. With `gradient` the backward
    pass covers all calibration windows, which costs time in proportion.
    """
    sequential: bool = False
    """compress each layer for the inputs produced by the layers compressed before it, towards the outputs of the dense
    model; off by default. Costs about three forward passes over the calibration windows, and statistics that cannot be
    reused for another ratio.
    """
    refine: bool = False
    """tune each block after its layers are compressed (with `sequential`): gradient steps on what they store as
    numbers, on integer codes, norms and biases, towards the output of the dense block; off by default. A block never
    gets worse on calibration samples that are held out, and takes no more bytes. Costs two to four times the time of
    the rest, and memory for nine more copies of a block in float32.
    """
    heal_tokens: HealingTokens | None = None
    """tokens on which the result is healed before it is exported: the numbers that its layers store, norms and biases
    are trained on text of the calibration dataset towards the predictions of the original, at the same size. null
    (default) trains nothing. Text that has fewer tokens is read again. For models that predict tokens and the engine
    rocket; needs memory for two copies of the whole model, and time in proportion to the tokens.
    """
    sensitivity_samples: Annotated[int, Field(ge=1)] = 32
    """calibration windows on which sensitivities are measured, at least 1, default 32, evenly spaced; the time of the
    backward pass is proportional to it. The weights of tokens in the others (`token_weights`) are predicted from these.
    """
    calibrate_all_experts: bool = False
    """calibrate every expert of a mixture on all tokens, instead of those that the router sends to it with an average
    of all others for what is missing; off by default. Costs as many times the experts' part of calibration as there are
    experts for each that a token is sent to.
    """
    cap_slack: Annotated[float, Field(ge=0)] = 0.01
    """relative slack on the smallest feasible error cap (objective `weight`), default 0.01. At the smallest cap itself
    almost every layer has one candidate left and the knapsack has nothing to choose. Costs nothing.
    """

    @property
    def calibrates(self) -> bool:
        """Whether calibration data is read."""
        return self.objective != "prior"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, settings: Any) -> Any:
        return with_preset(settings)


class CompressionConfig(MethodOptions):
    """Everything that decides what a compression produces, and where it computes."""

    ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """target compression ratio: fraction of the compressible parameters to remove, [0, 1); None (default) if a size or
    bits per weight are given instead, or if layers are only to be profiled.
    """
    target_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """upper bound on the size of all weights of the artifact that the engine reads (safetensors, or the GGUF file
    with everything in it), instead of a ratio; None by default. With it `budget` is `bytes`. Costs nothing.
    """
    bits: BitsPerWeight | None = None
    """upper bound on the bits per weight of the compressible layers as stored, (0, 16], instead of a ratio; None by
    default. Codes, scales, masks and factors are counted; biases and the rest of the model are not. With it `budget` is
    `bytes`. For the method `rocket`; `rtn` and `gptq` take `code_bits`. Costs nothing.
    """
    fit: Annotated[SerializeAsAny[MemoryFit], BeforeValidator(_as_divided)] | None = None
    """memory that the weights have to fit into together with a context and the engine, instead of a ratio; None by
    default. A run turns it into a size, and adds how the memory is divided. With it `budget` is `bytes`. Costs nothing.
    """
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """most KL divergence from the original, in nats per token, above 0, with files as small as possible, instead of a
    ratio; None by default. It is measured on the text of `evaluate`, by default on what the calibration leaves of its
    dataset. With it `budget` is `bytes`. Costs two to four times compressing, writing and evaluating, and memory for
    the whole model. For the objective `fisher` and models that predict tokens.
    """
    max_perplexity_increase: Increase | None = None
    """most increase of the perplexity, as a fraction of that of the original, above 0 and less than 1; otherwise like
    `max_kl`.
    """
    calibration: CalibrationConfig = CalibrationConfig()
    """the calibration data."""
    evaluate: EvaluationConfig | None = None
    """how the result is compared with the dense model; None (default) does not, and costs nothing."""
    accept: AcceptanceConfig | None = None
    """what the comparison must show for the verdict `accepted`; None (default) gives no verdict. Costs nothing, changes
    nothing in the artifacts, and needs `evaluate`.
    """
    benchmark: bool = False
    """whether speed and memory of the original and of each artifact are measured in the end; false by default. Takes
    memory for all of them together, and the time of 7 prompts of 128 tokens and answers of 64 with each.
    """
    device: str = "auto"
    """torch devices to compute on: `auto` (default: all accelerators if there are any, else the CPU), `cpu`, `cuda`
    (all GPUs), `cuda:1`, `cuda:0,cuda:2` ... On several, each has a process that profiles blocks and compresses them,
    unless that goes from layer to layer; everything else is done on the first.
    """
    max_shard_bytes: Annotated[int, Field(ge=1)] = 5 * _GIB
    """size at which a new safetensors file is started, default 5 GiB."""
    statistics_quota_bytes: Annotated[int, Field(ge=0)] = 64 * _GIB
    """disk space for eigenbases between profiling and factorization, default 64 GiB; blocks whose layers do not fit are
    calibrated a second time.
    """

    @model_validator(mode="before")
    @classmethod
    def _target_counts_bytes(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and any(settings.get(name) is not None for name in TARGETS_IN_BYTES):
            return {**settings, "budget": "bytes"}
        return settings

    @model_validator(mode="after")
    def _settings_agree(self) -> "CompressionConfig":
        for name in ("export", "kinds", "include", "code_bits", "group_size"):
            values = getattr(self, name) or ()
            if len(set(values)) != len(values):
                raise ValueError(f"{name} has the same entry twice; name each once")
        if not self.calibrates:
            self._check_uncalibrated()
        if self.objective == "weight" and "shared" in self.kinds:
            raise ValueError("kinds: a shared dictionary has no cap on each layer; take objective fisher or whitened")
        if self.column_weights and self.objective != "fisher":
            raise ValueError("column_weights need the sensitivities of objective fisher")
        if self.token_weights == "gradient" and self.objective != "fisher":  # noqa: S105 - no password
            raise ValueError("token_weights gradient needs objective fisher, which measures gradients")
        if "embeddings" in (self.include or ()) and not self.profiles_tables:
            raise ValueError("include embeddings: they are quantized, which needs kind quantized and budget bytes")
        if self.rounds_values and self.budget != "parameters":
            raise ValueError(
                "value_bits are for budget parameters; where the budget counts bytes, the bits of each layer are "
                "chosen from code_bits: leave value_bits out"
            )
        if self.refine and not self.sequential:
            raise ValueError("refine tunes blocks in the order of sequential compression: turn sequential on as well")
        if self.metric != "frobenius" and self.objective != "weight":
            raise ValueError("metric is what objective weight measures; leave it out, or take that objective")
        if self.stores_one_format:
            self._check_format()
        else:
            self._check_target()
        self._check_engine()
        self._check_acceptance()
        return self

    def _check_uncalibrated(self) -> None:
        """Raise an error about settings that need what only calibration tells."""
        name = "preset instant" if self.preset == "instant" else "objective prior"
        needing = {
            "calibration": self.calibration != CalibrationConfig(),
            f"method {self.method}": self.method != "rocket",
            "refine": self.refine,
            "sequential": self.sequential,
            "sweeps": self.sweeps > 0,
            "column_weights": self.column_weights,
            "token_weights": self.token_weights != "none",  # noqa: S105 - no password
            "heal_tokens": self.heal_tokens is not None,
            "calibrate_all_experts": self.calibrate_all_experts,
            "include vision": self.includes_vision,
        }
        asked = next((setting for setting, is_asked in needing.items() if is_asked), None)
        if asked is not None:
            raise ValueError(
                f"{name} reads no calibration data, which {asked} needs; leave it out, or take preset fast"
            )
        if self.budget != "bytes":
            raise ValueError(f"{name} keeps all parameters and counts bytes; budget must be bytes")
        unmeasured = [kind for kind in self.kinds if kind not in _INSTANT["kinds"]]
        if unmeasured:
            raise ValueError(f"{name} only quantizes; leave {unmeasured[0]} out of kinds, or take preset fast")

    def _check_acceptance(self) -> None:
        if self.accept is None:
            return
        if self.evaluate is None:
            raise ValueError("accept is about what an evaluation measures, and none is requested: add evaluate")
        if self.accept.max_task_drop is not None and not self.evaluate.tasks:
            raise ValueError("accept.max_task_drop is about zero-shot tasks, and none is requested: add evaluate.tasks")

    def _check_engine(self) -> None:
        engine = self.reader
        unreadable = [kind for kind in self.export if kind not in engine.readable]
        if unreadable:
            raise ValueError(
                f"engine {engine.name} does not read export {unreadable[0]}; take {' or '.join(engine.readable)}, or "
                "another engine"
            )
        if engine is ROCKET:
            return
        if self.budget != "bytes":
            raise ValueError(f"engine {engine.name} reads quantized layers, so that the budget must count bytes")
        if self.method != "rocket":
            raise ValueError(f"method {self.method} makes layers that engine {engine.name} does not read; take rocket")
        if not set(self.kinds) <= set(engine.kinds):
            unread = ", ".join(kind for kind in self.kinds if kind not in engine.kinds)
            raise ValueError(f"engine {engine.name} does not read {unread}; kinds may be {', '.join(engine.kinds)}")
        for name, asked, known in (
            ("code_bits", self.code_bits, engine.codes.bits),
            ("group_size", self.group_size, engine.codes.group_sizes),
        ):
            if asked and not known:
                raise ValueError(f"engine {engine.name} has types of blocks instead of {name}; leave it out")
            if not set(asked or ()) <= set(known or ()):
                raise ValueError(f"engine {engine.name} reads {name} of {', '.join(map(str, known or ()))} only")
        if self.heal_tokens is not None:
            raise ValueError(
                f"heal_tokens train numbers of a `rocket` artifact, which engine {engine.name} does not read; leave "
                "them out, or take the engine rocket"
            )
        if "embeddings" in (self.include or ()) and not engine.tables:
            raise ValueError(f"engine {engine.name} does not read quantized embeddings; leave include out")
        if self.includes_vision:
            raise ValueError(f"engine {engine.name} reads no compressed vision tower; leave 'vision' out of include")

    def _check_target(self) -> None:
        if self._limits_codes and not (self.quantizes and "quantized" in self.kinds):
            raise ValueError(
                "code_bits and group_size are for the methods rtn and gptq, or for method rocket with kind quantized "
                "and a size, bits per weight or budget bytes; leave them out"
            )
        target = self.target
        if not isinstance(target, ByRatio) and self.method != "rocket":
            raise ValueError(
                f"method {self.method} compresses every layer at one ratio and allocates nothing: give that"
            )
        if isinstance(target, ByLoss) and self.objective != "fisher":
            chosen = f"preset {self.preset}" if not self.calibrates else f"objective {self.objective}"
            raise ValueError(
                f"{target.measure} needs the objective fisher, which predicts the loss, and {chosen} does not: give a "
                "size, or take preset fast with its own objective"
            )
        sized = self.reader.exports[0]
        if isinstance(target, ByBytes) and sized not in self.export:
            name = "target_bytes is" if self.fit is None else "fit gives"
            raise ValueError(f"{name} a size of the {sized} artifact; export that")

    def _check_format(self) -> None:
        given = sorted(name for name in MEMBERS if getattr(self, name) is not None)
        if given:
            raise ValueError(
                f"method {self.method} quantizes every layer to code_bits, which decides the size: leave {given[0]} "
                "out, which is for other methods, such as rocket"
            )
        if self.budget != "bytes":
            raise ValueError(f"method {self.method} removes bytes and keeps all parameters; budget must be bytes")
        sizes = self.group_size or ()
        if len(self.code_bits or ()) != 1 or len(sizes) != 1:
            raise ValueError(
                f"method {self.method} stores every layer in one format: give one of code_bits and group_size"
            )
        if sizes[0] not in _ONE_FORMAT_GROUPS:
            raise ValueError(f"group_size: Input should be 0, 32, 64 or 128 for the method {self.method}")

    @property
    def stores_one_format(self) -> bool:
        """Whether the method stores every layer in one format."""
        return self.method in ONE_FORMAT_METHODS

    @property
    def target(self) -> Target | None:
        """The target; None if layers are only to be profiled."""
        if self.stores_one_format and self.code_bits and self.group_size:
            return ByFormat(bits=self.code_bits[0], group_size=self.group_size[0])
        return target_of({name: getattr(self, name) for name in MEMBERS})

    @property
    def loss_bounds(self) -> str | None:
        """Setting that bounds what is measured of a model's predictions; None if nothing does."""
        if isinstance(self.target, ByLoss):
            return self.target.measure
        return None if self.accept is None else "accept"

    @property
    def reader(self) -> Engine:
        """The engine that will run the result."""
        return ENGINES[self.engine]

    @property
    def evaluated_export(self) -> ExportKind:
        """The artifact that an evaluation measures: what the engine reads, or the first if it reads none."""
        return next((kind for kind in self.reader.exports if kind in self.export), self.export[0])

    @property
    def quantizes(self) -> bool:
        """Whether layers may be stored as integer codes: a kind of them is allowed, and the budget counts bytes."""
        return self.method == "rocket" and self.budget == "bytes" and ("quantized" in self.kinds or self.entropy_codes)

    @property
    def entropy_codes(self) -> bool:
        """Whether layers may be entropy coded, if the budget counts bytes; their codes have no fixed bits or groups."""
        return self.storage == "file" and "entropy_coded" in self.kinds and not self._limits_codes

    @property
    def codes_factors(self) -> bool:
        """Whether the factors of low-rank layers may be codes, if the budget counts bytes."""
        return {"low_rank", "quantized"}.issubset(self.kinds) and not self._limits_codes

    @property
    def code_choices(self) -> CodeChoices:
        """The formats that quantized candidates may have."""
        readable = self.reader.codes
        usual = MEMORY_GROUPS if self.storage == "memory" else None
        sizes = usual if readable.group_sizes is None else readable.group_sizes
        return replace(
            readable,
            bits=self.code_bits or readable.bits,
            group_sizes=sizes if self.group_size is None else self.group_size,
            alone={"quantized", "entropy_coded"}.issuperset(self.kinds),
            finest=readable.finest and self.group_size is None,
            fixed="quantized" in self.kinds,
            entropy_coded=self.entropy_codes,
            factors=self.codes_factors,
        )

    @property
    def _limits_codes(self) -> bool:
        return self.code_bits is not None or self.group_size is not None

    @property
    def rounds_values(self) -> bool:
        """Whether the numbers that layers keep are rounded."""
        return self.value_bits < 16

    @property
    def profiles_tables(self) -> bool:
        """Whether the token embedding and the head are profiled, because some target may quantize them."""
        return self.quantizes and "quantized" in self.kinds and self.include != () and self.reader.tables

    @property
    def ratio_counts_tables(self) -> bool:
        """Whether a ratio is one of layers, token embedding and head together."""
        return self.profiles_tables and "embeddings" in (self.include or ())

    @property
    def includes_vision(self) -> bool:
        """Whether the layers of the tower that encodes images are compressed."""
        return "vision" in (self.include or ())

    @property
    def decides_tables(self) -> bool:
        """Whether the target may be met by quantizing the token embedding and the head."""
        return self.ratio_counts_tables or (self.profiles_tables and isinstance(self.target, ByBytes | ByLoss))

    @property
    def healing(self) -> HealingConfig | None:
        """How the result is healed: on the text that it is calibrated on. None if it is not."""
        if self.heal_tokens is None:
            return None
        text = self.calibration.model_dump(include=set(HealingConfig.model_fields))
        return HealingConfig(tokens=self.heal_tokens, device=self.device.partition(",")[0], **text)

    def gradient_windows(self, windows: int) -> int:
        """Return how many of the calibration windows the backward pass covers."""
        return min(windows, self.sensitivity_samples)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the gradients of tokens decide how much each counts."""
        return self.measures_sensitivities and self.token_weights == "gradient"  # noqa: S105 - no password

    @property
    def measures_sensitivities(self) -> bool:
        """Whether sensitivities are measured with a backward pass before calibration."""
        return self.method == "rocket" and self.objective == "fisher"


def stage_label(name: str) -> str:
    """Return what happens in a stage, in words that need no knowledge of the method; other names unchanged."""
    return _STAGE_LABELS.get(name, name)


def with_preset(settings: Any) -> Any:
    """Return settings with missing ones filled in from their preset.

    Anything but a mapping with a known preset is returned unchanged. Preset values that are incompatible with the given
    objective are replaced.
    """
    if not isinstance(settings, Mapping):
        return settings
    usual = DEFAULT_PRESET if settings.get("method", "rocket") == "rocket" else "paper"
    preset = settings.get("preset", usual)
    chosen = next((values for name, values in PRESETS.items() if name == preset), None)
    if chosen is None:
        return settings
    if settings.get("objective", chosen["objective"]) == "prior":
        chosen = {**chosen, **_INSTANT}
    yielding: dict[str, Any] = {}
    engine = next((known for name, known in ENGINES.items() if name == settings.get("engine")), ROCKET)
    if engine is not ROCKET:
        yielding |= {"kinds": engine.kinds, "export": engine.exports, "budget": "bytes"}
    objective = settings.get("objective", chosen["objective"])
    if objective != "fisher":
        yielding |= {"column_weights": False, "token_weights": "none"}
    if objective == "weight":
        kinds = yielding.get("kinds", chosen["kinds"])
        yielding["kinds"] = tuple(kind for kind in kinds if kind != "shared")
    if any(settings.get("method") == name for name in ONE_FORMAT_METHODS):
        nulls = {name for name in ("code_bits", "group_size") if settings.get(name) is None}
        settings = {**_ONE_FORMAT, **{name: value for name, value in settings.items() if name not in nulls}}
    return {**chosen, **yielding, "preset": preset, **settings}


def compression_config(**settings: object) -> CompressionConfig:
    """Validate settings given as keyword arguments.

    Returns:
        The configuration.

    Raises:
        InvalidConfigError: a setting is unknown or out of range; the message names each.
    """
    return _validated(CompressionConfig, "compression", settings)


def healing_config(**settings: object) -> HealingConfig:
    """Validate settings of healing given as keyword arguments.

    Returns:
        The configuration.

    Raises:
        InvalidConfigError: a setting is unknown or out of range; the message names each.
    """
    return _validated(HealingConfig, "healing", settings)


def _validated(kind: type[_Config], what: str, settings: Mapping[str, object]) -> _Config:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise InvalidConfigError(f"invalid {what} settings: {problems}") from error


def with_evaluation(config: CompressionConfig) -> CompressionConfig:
    """Return the settings of a run, to which a bound on the measured loss adds an evaluation.

    Raises:
        InvalidConfigError: the result would be trained after the bound has decided its size.
    """
    target = config.target
    if not isinstance(target, ByLoss):
        return config
    if config.heal_tokens is not None:
        raise InvalidConfigError(
            f"heal_tokens change the loss after {target.measure} has decided the size; heal the result, or give a size"
        )
    if config.evaluate is not None:
        return config
    return config.model_copy(update={"evaluate": EvaluationConfig(dataset=config.calibration.dataset)})
