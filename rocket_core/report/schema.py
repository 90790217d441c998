"""The report of a compression: what each layer got, and why."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.budget import achieved_ratio
from rocket_core.candidates import Candidate, CandidateKind, FrontierPoint, LayerProfile
from rocket_core.config import Budget, CompressionConfig, ExportKind, InputKind, Objective
from rocket_core.report.quality import EvaluationReport
from rocket_core.schema import described


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=described)


class StageEnergy(_Frozen):
    """The energy that one stage took, in kWh, resumed runs added up.

    Attributes:
        processor_kwh: of the processor: counted by the processor itself, all of it; or estimated from its model and the
            load that this process made.
        memory_kwh: of the memory that this process held; always estimated from its size.
        accelerator_kwh: of the accelerators that this process might use, as their driver tells; None on the CPU.
        processor_counted: whether the processor counted, in every run.
    """

    processor_kwh: float
    memory_kwh: float
    accelerator_kwh: float | None = None
    processor_counted: bool

    @property
    def kwh(self) -> float:
        """All of it."""
        return self.processor_kwh + self.memory_kwh + (self.accelerator_kwh or 0.0)


class StageReport(_Frozen):
    """What one stage cost.

    Attributes:
        name: downloading, preflight, differentiating, calibrating, allocating, factorizing, exporting or evaluating.
        seconds: wall time in seconds, resumed runs added up.
        peak_memory_bytes: highest resident memory of the process while the stage ran (since its start where the
            system cannot tell).
        peak_device_bytes: highest memory allocated on the accelerator; None on the CPU.
        device: what computed: the accelerator's name, or the processor's with the number of threads; several where a
            resumed run moved. None in reports from before there was any.
        energy: what it took; None where it was not measured.
    """

    name: str
    seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None = None
    device: str | None = None
    energy: StageEnergy | None = None


class AllocationReport(_Frozen):
    """The knapsack's answer.

    Attributes:
        objective: what was summed over layers.
        measure: what the budget counts: parameters or bytes.
        budget: kept parameters, or stored bytes of the compressible layers, allowed.
        kept: what was allocated of it.
        alpha: error cap over `reference_error`; None where the objective has no cap.
        smallest_alpha: the smallest alpha at which any allocation fits; None where there is no cap.
        reference_error: mean error of all layers compressed uniformly at the target ratio; None where there is no cap.
        total_error: sum of the objective over the layers.
        lower_bound: no allocation within budget and cap has a smaller sum.
        proven: whether `total_error` is that bound: the allocation is optimal.
    """

    objective: Objective
    measure: Budget = "parameters"
    budget: int
    kept: int | None = None
    alpha: float | None
    smallest_alpha: float | None
    reference_error: float | None
    total_error: float
    lower_bound: float
    proven: bool


class LayerOutcome(_Frozen):
    """What became of a layer that was compressed.

    Attributes:
        nnz: nonzeros stored.
        kept_parameters: the paper's count.
        stored_bytes: bytes on disk in the factored export, mask included, bias excluded.
        achieved_error: relative error of the layer's output over the calibration tokens; with sequential compression
            that of the compressed model's layer from the dense model's, errors of the layers before it included. With
            column weights weighted as in the profile.
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
        kept_parameters: the paper's count.
        stored_bytes: bytes on disk in the factored export, mask included, bias excluded.
        compression_ratio: fraction of this layer's parameters removed, [0, 1).
        reconstruction_error: relative error of the layer's output over the calibration tokens, as the profile predicts
            it (sequential compression and extra nonzeros not counted).
        weight_error: relative error in the original space, as the profile predicts it.
        loss: predicted increase of the model's loss, nats per token; None where sensitivities were not measured.
        achieved_error: as `reconstruction_error`, of what was stored; see `LayerOutcome`. 0 if dense.
        frontier: what the knapsack chose from, by falling cost; see `FrontierPoint`.
        input_group: first layer that reads the same input.
        dictionary: the layer with which the dictionary is stored, if it is another one's or shared; None otherwise.
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
        folder: its name under the output folder.
        stored_bytes: bytes of all its safetensors files.
    """

    kind: ExportKind
    folder: str
    stored_bytes: int


class TotalsReport(_Frozen):
    """Sizes before and after.

    Attributes:
        compressible_parameters: parameters of the selected linear layers.
        kept_parameters: what is left of them.
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
    """The calibration data as they were used.

    Attributes:
        kind: what the model reads; the decoder of a model of audio reads built-in text beside it.
        dataset: name of the data; `synthetic` are made up, and cost quality.
        samples: windows of text or audio, or images.
        sequence_length: tokens per window of text; of images, positions of one.
        seed: seed of the draw.
        tokens: positions in all: tokens, and what audio and images become in the model.
        token_sha256: hash of what the model reads, 64 hexadecimal digits.
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
        evaluation: quality before and after; None where none was asked for, and in reports from before there was any.
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
        """What all stages took; None where any of them was not measured."""
        return energy_of(self.stages)

    @property
    def energy_is_estimated(self) -> bool:
        """Whether the processor's part of the energy was estimated anywhere."""
        return is_estimated(self.stages)

    @property
    def energy_text(self) -> str | None:
        """`energy_kwh` for people; see `energy_text`."""
        return energy_text(self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """Everything that computed, each once."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages if stage.device is not None))


def energy_of(stages: Sequence[StageReport]) -> float | None:
    """What stages took together, in kWh; None where any of them was not measured."""
    energies = [stage.energy for stage in stages]
    if not energies or None in energies:
        return None
    return sum((energy.kwh for energy in energies if energy is not None), 0.0)


def is_estimated(stages: Sequence[StageReport]) -> bool:
    """Whether the processor's part of their energy was estimated anywhere."""
    return any(stage.energy is not None and not stage.energy.processor_counted for stage in stages)


def energy_text(stages: Sequence[StageReport]) -> str | None:
    """Energy for people: 76.5 Wh, or about 76.5 Wh where the processor's part is an estimate; None where unknown."""
    kwh = energy_of(stages)
    return None if kwh is None else f"{'about ' if is_estimated(stages) else ''}{kwh_text(kwh)}"


def kwh_text(kwh: float) -> str:
    """An energy to three digits: 0.00342 Wh, 76.5 Wh, 7.88 kWh."""
    return f"{1000 * kwh:.3g} Wh" if kwh < 1 else f"{kwh:.3g} kWh"


def layer_report(
    profile: LayerProfile,
    candidate: Candidate,
    outcome: LayerOutcome | None,
    frontier: tuple[FrontierPoint, ...] = (),
) -> LayerReport:
    """Describes a layer under the candidate chosen for it.

    Args:
        profile: the layer.
        candidate: its candidate.
        outcome: what became of it; None if it stayed dense.
        frontier: what was chosen from.
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
        sparsity=None if nnz is None else 1 - nnz / (rows * profile.d_out),
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
