"""The report of a compression: the result for each layer, and the reasons for it."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.budget import achieved_ratio, sparsity
from rocket_core.candidates import Candidate, CandidateKind, FrontierPoint, LayerProfile
from rocket_core.config import BudgetUnit, CompressionConfig, ExportKind, InputKind, Objective
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import described


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=described)


class StageEnergy(_Frozen):
    """The energy that one stage used, in kWh, summed over resumed runs.

    Attributes:
        processor_kwh: energy of the processor: all of it if read from the processor's counters; otherwise estimated
            from its model and the load of this process.
        memory_kwh: energy of the memory that this process held; always estimated from its size.
        accelerator_kwh: energy of the accelerators visible to this process, as reported by their driver; None on the
            CPU.
        processor_counted: whether the processor's counters were read in every run.
    """

    processor_kwh: float
    memory_kwh: float
    accelerator_kwh: float | None = None
    processor_counted: bool

    @property
    def kwh(self) -> float:
        """Total energy."""
        return self.processor_kwh + self.memory_kwh + (self.accelerator_kwh or 0.0)


class StageReport(_Frozen):
    """Cost of one stage.

    Attributes:
        name: downloading, preflight, differentiating, calibrating, allocating, factorizing, exporting or evaluating.
        seconds: wall time in seconds, summed over resumed runs.
        peak_memory_bytes: highest resident memory of the process while the stage ran (since process start if the
            system cannot report that).
        peak_device_bytes: highest memory allocated on the accelerator; None on the CPU.
        device: the accelerator's name, or the processor's with the number of threads; several if a resumed run
            moved to another device. None in reports from before this field existed.
        energy: energy used by the stage; None if it was not measured.
    """

    name: str
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None = None
    device: str | None = None
    energy: StageEnergy | None = None


class AllocationReport(_Frozen):
    """The result of the knapsack.

    Attributes:
        objective: what was summed over layers.
        measure: what the budget counts: parameters or bytes.
        budget: kept parameters, or stored bytes of the compressible layers, allowed.
        kept: amount of the budget that was allocated.
        alpha: error cap divided by `reference_error`; None if the objective has no cap.
        smallest_alpha: the smallest alpha at which any allocation fits; None without a cap.
        reference_error: mean error of all layers compressed uniformly at the target ratio; None without a cap.
        total_error: sum of the objective over the layers.
        lower_bound: no allocation within budget and cap has a smaller sum.
        proven: whether `total_error` equals that bound, so that the allocation is optimal.
    """

    objective: Objective
    measure: BudgetUnit = "parameters"
    budget: int
    kept: int | None = None
    alpha: float | None
    smallest_alpha: float | None
    reference_error: float | None
    total_error: float
    lower_bound: float
    proven: bool


class LayerOutcome(_Frozen):
    """The result of compressing a layer.

    Attributes:
        nnz: nonzeros stored.
        kept_parameters: kept parameters as the paper counts them.
        stored_bytes: bytes on disk in the factored export, mask included, bias excluded.
        achieved_error: relative error of the layer's output over the calibration tokens; with sequential compression,
            the error of the compressed model's layer relative to the dense model's, including errors of earlier layers.
            With column weights, weighted as in the profile.
    """

    nnz: int
    kept_parameters: int
    stored_bytes: int
    achieved_error: float


class LayerReport(_Frozen):
    """One layer: how it is stored and what that costs.

    Attributes:
        name: module name.
        kind: dense, low_rank, factored or sparse.
        d_in: input features.
        d_out: output features.
        rank: number of atoms; None if dense or sparse.
        nnz: nonzero coefficients; None if dense.
        sparsity: fraction of zeros among the coefficients, [0, 1]; None if dense.
        rank_nnz_ratio: atoms per nonzero of a coefficient column; None if dense.
        kept_parameters: kept parameters as the paper counts them.
        stored_bytes: bytes on disk in the factored export, mask included, bias excluded.
        compression_ratio: fraction of this layer's parameters removed, [0, 1).
        reconstruction_error: relative error of the layer's output over the calibration tokens, as predicted by the
            profile (without sequential compression and extra nonzeros).
        weight_error: relative error in the original space, as predicted by the profile.
        loss: predicted increase of the model's loss, nats per token; None if sensitivities were not measured.
        achieved_error: as `reconstruction_error`, for the stored layer; see `LayerOutcome`. 0 if dense.
        frontier: the candidates that the knapsack chose from, by falling cost; see `FrontierPoint`.
        input_group: first layer that reads the same input.
        dictionary: the layer that stores the dictionary, if the dictionary is shared; None otherwise.
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
    loss: float | None = None
    achieved_error: float | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    input_group: str
    dictionary: str | None = None


class ExportReport(_Frozen):
    """One artifact folder.

    Attributes:
        kind: factored or dense.
        folder: its name within the output folder.
        stored_bytes: bytes of all its safetensors files.
    """

    kind: ExportKind
    folder: str
    stored_bytes: int


class TotalsReport(_Frozen):
    """Sizes before and after.

    Attributes:
        compressible_parameters: parameters of the selected linear layers.
        kept_parameters: number of them that remain.
        achieved_ratio: fraction of the compressible parameters removed, [0, 1).
        achieved_byte_ratio: fraction of the compressible layers' bytes removed, masks counted.
        model_parameters: parameters of the whole model.
        model_compression_ratio: fraction of the whole model's parameters removed, [0, 1).
        stored_bytes: bytes of all safetensors of the smallest export.
        dense_bytes: bytes of all safetensors of the original.
    """

    compressible_parameters: int
    kept_parameters: int
    achieved_ratio: float
    achieved_byte_ratio: float | None = None
    model_parameters: int
    model_compression_ratio: float
    stored_bytes: int
    dense_bytes: int


class CalibrationReport(_Frozen):
    """The calibration data used.

    Attributes:
        kind: what the model reads; the decoder of an audio model additionally reads built-in text.
        dataset: name of the data; `synthetic` data are generated, and cost quality.
        samples: windows of text or audio, or images.
        sequence_length: tokens per window of text; for images, positions of one image.
        seed: seed of the choice of samples.
        tokens: total positions: tokens, and the positions that audio and images become in the model.
        token_sha256: hash of the model's inputs, 64 hexadecimal digits.
    """

    kind: InputKind = "text"
    dataset: str
    samples: int
    sequence_length: int
    seed: int
    tokens: int
    token_sha256: str


class CompressionReport(_Frozen):
    """All information needed to understand and repeat a compression.

    Attributes:
        report_version: version of this layout.
        rocket_version: version of the library.
        fingerprint: hash of model, calibration, settings and version.
        model: folder name or repository id as requested.
        model_class: transformers class that loads the artifacts.
        revision: commit of the repository, or the hash of the folder's weights.
        settings: all settings.
        calibration: the calibration data.
        stages: cost of each stage, in order.
        allocation: result of the knapsack.
        totals: sizes before and after.
        exports: artifacts written.
        layers: one entry per compressible layer, in model order.
        skipped: layers that were left alone, with the reason.
        evaluation: quality before and after; None if none was requested, and in reports from before this field existed.
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
    evaluation: EvaluationReport | None = None

    @property
    def seconds(self) -> float:
        """Wall time of all stages."""
        return sum((stage.seconds for stage in self.stages), 0.0)

    @property
    def peak_memory_bytes(self) -> int:
        """Highest resident memory of all stages."""
        return max((stage.peak_memory_bytes for stage in self.stages), default=0)

    @property
    def energy_kwh(self) -> float | None:
        """Energy of all stages, in kWh; None if any of them was not measured."""
        return energy_of(self.stages)

    @property
    def energy_is_estimated(self) -> bool:
        """Whether the processor's share of the energy was estimated in any stage."""
        return is_estimated(self.stages)

    @property
    def energy_text(self) -> str | None:
        """`energy_kwh` as human-readable text; see `energy_text`."""
        return energy_text(self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices used, each once."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages if stage.device is not None))


def energy_of(stages: Sequence[StageReport]) -> float | None:
    """Return the total energy of stages, in kWh; None if any of them was not measured."""
    energies = [stage.energy for stage in stages]
    if not energies or None in energies:
        return None
    return sum((energy.kwh for energy in energies if energy is not None), 0.0)


def is_estimated(stages: Sequence[StageReport]) -> bool:
    """Return whether the processor's share of the energy was estimated in any stage."""
    return any(stage.energy is not None and not stage.energy.processor_counted for stage in stages)


def energy_text(stages: Sequence[StageReport]) -> str | None:
    """Return the energy as text: 76.5 Wh, or about 76.5 Wh if the processor's share is estimated; None if unknown."""
    kwh = energy_of(stages)
    return None if kwh is None else f"{'about ' if is_estimated(stages) else ''}{kwh_text(kwh)}"


def kwh_text(kwh: float) -> str:
    """Return an energy to three digits: 0.00342 Wh, 76.5 Wh, 7.88 kWh."""
    return f"{1000 * kwh:.3g} Wh" if kwh < 1 else f"{kwh:.3g} kWh"


def layer_report(
    profile: LayerProfile,
    candidate: Candidate,
    outcome: LayerOutcome | None,
    frontier: tuple[FrontierPoint, ...] = (),
) -> LayerReport:
    """Describe a layer with its chosen candidate.

    Args:
        profile: profile of the layer.
        candidate: the chosen candidate.
        outcome: result of compressing the layer; None if it stayed dense.
        frontier: the candidates that the knapsack chose from.
    """
    rows = profile.d_in if candidate.rank is None else candidate.rank
    nnz = None if outcome is None else outcome.nnz
    kept = candidate.kept_parameters if outcome is None else outcome.kept_parameters
    return LayerReport(
        name=profile.name,
        kind=candidate.kind,
        d_in=profile.d_in,
        d_out=profile.d_out,
        rank=candidate.rank,
        nnz=nnz,
        sparsity=None if nnz is None else sparsity(rows, profile.d_out, nnz),
        rank_nnz_ratio=None if nnz is None or candidate.rank is None else rows * profile.d_out / nnz,
        kept_parameters=kept,
        stored_bytes=candidate.stored_bytes if outcome is None else outcome.stored_bytes,
        compression_ratio=achieved_ratio(profile.parameters, kept),
        reconstruction_error=candidate.reconstruction_error,
        weight_error=candidate.weight_error,
        loss=candidate.loss,
        achieved_error=0.0 if outcome is None else outcome.achieved_error,
        frontier=frontier,
        input_group=profile.input_group,
        dictionary=candidate.dictionary,
    )
