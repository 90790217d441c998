"""The report of a compression: what each layer got, and why."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.budget import achieved_ratio
from rocket_core.candidates import Candidate, CandidateKind, LayerProfile
from rocket_core.config import CompressionConfig, ExportKind, InputKind, Objective


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StageReport(_Frozen):
    """What one stage cost.

    Attributes:
        name: downloading, preflight, calibrating, allocating, factorizing or exporting.
        seconds: wall time, resumed runs added up.
        peak_memory_bytes: highest resident memory of the process while the stage ran (since its start where the
            system cannot tell).
        peak_device_bytes: highest memory allocated on the accelerator; None on the CPU.
    """

    name: str
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None = None


class AllocationReport(_Frozen):
    """The knapsack's answer.

    Attributes:
        objective: what was summed over layers.
        budget: kept parameters allowed.
        alpha: error cap over `reference_error`; None where the objective has no cap.
        smallest_alpha: the smallest alpha at which any allocation fits; None where there is no cap.
        reference_error: mean error of all layers compressed uniformly at the target ratio; None where there is no cap.
        total_error: sum of the objective over the layers.
        lower_bound: no allocation within budget and cap has a smaller sum.
        proven: whether `total_error` is that bound: the allocation is optimal.
    """

    objective: Objective
    budget: int
    alpha: float | None
    smallest_alpha: float | None
    reference_error: float | None
    total_error: float
    lower_bound: float
    proven: bool


class LayerReport(_Frozen):
    """One layer: how it is stored and what that costs.

    Attributes:
        name: module name.
        kind: dense or factored.
        d_in: input features.
        d_out: output features.
        rank: number of atoms; None if dense.
        nnz: nonzero coefficients; None if dense.
        sparsity: fraction of zeros among the coefficients; None if dense.
        rank_nnz_ratio: atoms per nonzero of a coefficient column; None if dense.
        kept_parameters: the paper's count.
        stored_bytes: bytes on disk in the factored export, mask included, bias excluded.
        compression_ratio: fraction of this layer's parameters removed.
        reconstruction_error: relative error of the layer's output over the calibration tokens.
        weight_error: relative error in the original space.
        input_group: first layer that reads the same input.
    """

    name: str
    kind: CandidateKind
    d_in: int
    d_out: int
    rank: int | None
    nnz: int | None
    sparsity: float | None
    rank_nnz_ratio: float | None
    kept_parameters: int
    stored_bytes: int
    compression_ratio: float
    reconstruction_error: float
    weight_error: float
    input_group: str


class ExportReport(_Frozen):
    """One artifact folder.

    Attributes:
        kind: factored or dense.
        folder: its name under the output folder.
        stored_bytes: size of all its safetensors files.
    """

    kind: ExportKind
    folder: str
    stored_bytes: int


class TotalsReport(_Frozen):
    """Sizes before and after.

    Attributes:
        compressible_parameters: parameters of the selected linear layers.
        kept_parameters: what is left of them.
        achieved_ratio: fraction of the compressible parameters removed.
        model_parameters: parameters of the whole model.
        model_compression_ratio: fraction of the whole model's parameters removed.
        stored_bytes: all safetensors of the smallest export.
        dense_bytes: all safetensors of the original.
    """

    compressible_parameters: int
    kept_parameters: int
    achieved_ratio: float
    model_parameters: int
    model_compression_ratio: float
    stored_bytes: int
    dense_bytes: int


class CalibrationReport(_Frozen):
    """The calibration data as they were used.

    Attributes:
        kind: what the model reads; the decoder of a model of audio reads built-in text beside it.
        dataset: name of the data; `synthetic` are made up, and cost quality.
        samples: windows of text or audio, or images.
        sequence_length: tokens per window of text; of images, positions of one.
        seed: seed of the draw.
        tokens: positions in all: tokens, and what audio and images become in the model.
        token_sha256: hash of what the model reads.
    """

    kind: InputKind = "text"
    dataset: str
    samples: int
    sequence_length: int
    seed: int
    tokens: int
    token_sha256: str


class CompressionReport(_Frozen):
    """Everything a reader needs to understand and repeat a compression.

    Attributes:
        report_version: version of this layout.
        rocket_version: version of the library.
        fingerprint: hash of model, calibration, settings and version.
        model: folder name or repository id as asked for.
        model_class: the class of transformers that loads the artifacts.
        revision: commit of the repository, or the hash of the folder's weights.
        settings: all settings.
        calibration: the calibration text.
        stages: cost of each stage, in order.
        allocation: the knapsack's answer.
        totals: sizes.
        exports: artifacts written.
        layers: one entry per compressible layer, in model order.
        skipped: layers that were left alone, with the reason.
    """

    report_version: Literal[1] = 1
    rocket_version: str
    fingerprint: str
    model: str
    model_class: str = "AutoModelForCausalLM"
    revision: str | None
    settings: CompressionConfig
    calibration: CalibrationReport
    stages: tuple[StageReport, ...]
    allocation: AllocationReport
    totals: TotalsReport
    exports: tuple[ExportReport, ...]
    layers: tuple[LayerReport, ...]
    skipped: Annotated[dict[str, str], Field(default_factory=dict)]


def layer_report(profile: LayerProfile, candidate: Candidate) -> LayerReport:
    """Describes a layer under the candidate chosen for it."""
    coefficients = None if candidate.rank is None else candidate.rank * profile.d_out
    nnz = candidate.nnz
    return LayerReport(
        name=profile.name,
        kind=candidate.kind,
        d_in=profile.d_in,
        d_out=profile.d_out,
        rank=candidate.rank,
        nnz=nnz,
        sparsity=None if coefficients is None or nnz is None else 1 - nnz / coefficients,
        rank_nnz_ratio=None if coefficients is None or nnz is None else coefficients / nnz,
        kept_parameters=candidate.kept_parameters,
        stored_bytes=candidate.stored_bytes,
        compression_ratio=achieved_ratio(profile.parameters, candidate.kept_parameters),
        reconstruction_error=candidate.reconstruction_error,
        weight_error=candidate.weight_error,
        input_group=profile.input_group,
    )
