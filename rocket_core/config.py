"""What a user may choose about a compression; every value is checked here and nowhere else."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rocket_core.errors import InvalidConfigError

Objective = Literal["weight", "whitened"]
ExportKind = Literal["factored", "dense"]
StorageDtype = Literal["auto", "float32", "float16", "bfloat16"]
Precision = Literal["float32", "float64"]
InputKind = Literal["text", "images", "audio"]
"""What a model reads."""

HUB_DATASETS = ("wikitext2", "ptb", "alpaca", "refinedweb", "c4")
BUILTIN_DATASET = "builtin"
# Images or audio made up from the seed. Never a default: what stands in for real data costs quality.
SYNTHETIC_DATASET = "synthetic"
PROFILE_RATIOS = tuple(round(0.05 * step, 2) for step in range(1, 15))
PROFILE_RANK_NNZ_RATIOS = tuple(round(1.0 + 0.1 * step, 1) for step in range(21))

# Under the output folder, until the artifacts are complete.
WORK_FOLDER_NAME = ".rocket-work"

_GIB = 2**30


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CalibrationConfig(_Frozen):
    """Which inputs the Gram matrices are computed from.

    Attributes:
        dataset: for a model that reads text `builtin`, a name of `HUB_DATASETS`, or the path of a local `.txt` or
            `.jsonl` file; for one that reads images or audio the path of a folder of images (`.png`, `.jpg`, `.jpeg`)
            or of audio (`.wav`), or `synthetic`, a stand-in that costs quality.
        samples: windows of tokens, images, or windows of audio, at least 1.
        sequence_length: tokens per window of text; None takes 1024 or what the model can attend to, whichever is less.
            Images have none.
        seed: which samples are drawn.
    """

    dataset: str = BUILTIN_DATASET
    samples: Annotated[int, Field(ge=1)] = 256
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class CompressionConfig(_Frozen):
    """Everything that decides what a compression produces, and where it computes.

    Attributes:
        ratio: target compression ratio: fraction of the compressible parameters to remove, [0, 1).
        calibration: the calibration text.
        objective: error that the knapsack sums over layers: `weight` (the paper: relative error in the original
            space, under a cap on each layer) or `whitened` (squared relative error in the whitened space, no cap).
        ignore: glob patterns of layer names that stay dense; each must match at least one compressible layer.
        export: artifacts to write.
        device: torch device that computes: `auto` (an accelerator if there is one), `cpu`, `cuda`, `cuda:1` ...
        dtype: dtype in which the model runs and is stored; `auto` is the checkpoint's own.
        precision: dtype of supports and least squares; `float64` is the reference that tests hold `float32` against.
            Eigenbases are computed in float64 either way.
        importance_balance: weight λ of the original-space importance, [0, 1].
        over_sparsification: β, fraction of the coefficients left to the global reactivation, [0, 1).
        ridge: μ relative to each coefficient row's energy.
        shrinkage: pull of the Gram matrix towards its diagonal, relative to d_in / tokens.
        cap_slack: relative slack on the smallest feasible error cap (objective `weight`). At the smallest cap itself
            almost every layer has one candidate left and the knapsack nothing to choose.
        max_shard_bytes: size at which a new safetensors file is begun.
        statistics_quota_bytes: disk that eigenbases may take between profiling and factorization; the blocks of layers
            beyond it are calibrated a second time.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)]
    calibration: CalibrationConfig = CalibrationConfig()
    objective: Objective = "weight"
    ignore: tuple[str, ...] = ()
    export: Annotated[tuple[ExportKind, ...], Field(min_length=1)] = ("factored", "dense")
    device: str = "auto"
    dtype: StorageDtype = "auto"
    precision: Precision = "float32"
    importance_balance: Annotated[float, Field(ge=0, le=1)] = 0.5
    over_sparsification: Annotated[float, Field(ge=0, lt=1)] = 5e-3
    ridge: Annotated[float, Field(gt=0, le=1e-2)] = 1e-9
    shrinkage: Annotated[float, Field(ge=0, le=1)] = 0.05
    cap_slack: Annotated[float, Field(ge=0)] = 0.01
    max_shard_bytes: Annotated[int, Field(ge=1)] = 5 * _GIB
    statistics_quota_bytes: Annotated[int, Field(ge=0)] = 64 * _GIB

    @model_validator(mode="after")
    def _exports_are_distinct(self) -> "CompressionConfig":
        if len(set(self.export)) != len(self.export):
            raise ValueError("export names the same artifact twice; name each once")
        return self


def compression_config(**settings: object) -> CompressionConfig:
    """Validates settings given by name.

    Returns:
        The configuration.

    Raises:
        InvalidConfigError: a setting is unknown or out of range; the message names each.
    """
    try:
        return CompressionConfig.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'settings'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise InvalidConfigError(f"invalid compression settings: {problems}") from error
