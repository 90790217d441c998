"""The report of a compression: the result for each layer, and the reasons for it."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from rocket_core.candidates import CODE_KINDS, CandidateKind, FrontierPoint
from rocket_core.config import CompressionConfig, Objective
from rocket_core.engines import NamedExport, current_name
from rocket_core.estimates.coverage import Coverage
from rocket_core.report.calibration import CalibrationReport
from rocket_core.report.formatting import bytes_text, kwh_text, percent_text
from rocket_core.report.healing import HealingReport
from rocket_core.report.loading import NOT_LOADED, LoadingReport
from rocket_core.report.loss_rounds import LossRound
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.speed import SpeedReport
from rocket_core.report.tensor_groups import TensorGroup
from rocket_core.report.verdict import Verdict
from rocket_core.schema import FrozenModel
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.budget import BudgetUnit
from rocket_core.sizes.code_format import CodeBits, ScaleBits
from rocket_core.sizes.memory_fit import FittedMemory


class StageEnergy(FrozenModel):
    """The energy that one stage used, in kWh, summed over resumed runs; below 0.05 s it may be 0."""

    processor_kwh: float
    """energy of the processor: all of it if read from the processor's counters; otherwise estimated from its model and
    the load of this process.
    """
    memory_kwh: float
    """energy of the memory that this process held; always estimated from its size."""
    accelerator_kwh: float | None = None
    """energy of the accelerators visible to this process, as reported by their driver; None on the CPU."""
    processor_counted: bool
    """whether the processor's counters were read in every run."""

    @property
    def kwh(self) -> float:
        """Total energy."""
        return self.processor_kwh + self.memory_kwh + (self.accelerator_kwh or 0.0)


class StageReport(FrozenModel):
    """Cost of one stage."""

    name: str
    """downloading, preflight, differentiating, calibrating, allocating, factorizing, healing, exporting, evaluating or
    benchmarking.
    """
    seconds: float
    """wall time in seconds, summed over resumed runs."""
    peak_memory_bytes: int
    """highest resident memory of the process while the stage ran (since process start if the system cannot report
    that).
    """
    peak_device_bytes: int | None = None
    """highest memory allocated on the accelerator; None on the CPU."""
    device: str | None = None
    """the accelerator's name, or the processor's with the number of threads; several if a resumed run moved to another
    device. None in reports from before this field existed.
    """
    kernels: str | None = None
    """what ran the loops of rounding: numba, triton or torch; several if a resumed run moved to another device. None if
    the stage rounded nothing, and in reports from before this field existed.
    """
    energy: StageEnergy | None = None
    """energy used by the stage; None if it was not measured."""


class AllocationReport(FrozenModel):
    """The result of the knapsack."""

    objective: Objective
    """what was summed over layers."""
    measure: BudgetUnit = "parameters"
    """what the budget counts: parameters or bytes."""
    budget: int
    """kept parameters, or stored bytes of the compressible layers, allowed."""
    kept: int | None = None
    """amount of the budget that was allocated."""
    alpha: float | None
    """error cap divided by `reference_error`; None if the objective has no cap."""
    smallest_alpha: float | None
    """the smallest alpha at which any allocation fits; None without a cap."""
    reference_error: float | None
    """mean error of all layers compressed uniformly at the target ratio; None without a cap."""
    total_error: float
    """sum of the objective over the layers."""
    lower_bound: float
    """no allocation within budget and cap has a smaller sum."""
    proven: bool
    """whether `total_error` equals that bound, so that the allocation is optimal."""


class LayerOutcome(FrozenModel):
    """The result of compressing a layer."""

    nnz: int
    """nonzeros stored."""
    kept_parameters: int
    """kept parameters as the paper counts them."""
    stored_bytes: int
    """bytes on disk in the `rocket` export, mask included, bias excluded."""
    achieved_error: float
    """relative error of the layer's output over the calibration tokens; with sequential compression, the error of the
    compressed model's layer relative to the dense model's, including errors of earlier layers. With column weights,
    weighted as in the profile.
    """


class BlockReport(FrozenModel):
    """A block that was refined."""

    name: str
    """name of the block in the model."""
    error_before: float
    """mean squared difference to the dense block's output per token, on calibration samples that are held out."""
    error_after: float
    """what refinement minimises after it, in the same unit; never larger (`rocket_core.refinement.BlockErrors`)."""


class LayerReport(FrozenModel):
    """One layer: how it is stored and what that costs."""

    name: str
    """module name."""
    kind: CandidateKind
    """dense, low_rank, factored, sparse, quantized or entropy_coded."""
    d_in: int
    """input features."""
    d_out: int
    """output features."""
    rank: int | None
    """number of atoms; None if dense or sparse."""
    nnz: int | None
    """nonzero coefficients; None if dense or of codes."""
    sparsity: float | None
    """fraction of zeros among the coefficients, [0, 1]; None if dense or of codes."""
    rank_nnz_ratio: float | None
    """atoms per nonzero of a coefficient column; None if dense."""
    kept_parameters: int
    """kept parameters as the paper counts them."""
    stored_bytes: int
    """bytes on disk in the `rocket` export, mask included, bias excluded."""
    bits_per_weight: float | None = None
    """bits on disk for each weight that the layer has when dense; None in reports of earlier releases."""
    bits: CodeBits | None = None
    """bits of a code; None unless quantized."""
    group_size: int | None = None
    """inputs that share a scale; None unless quantized."""
    scale_bits: ScaleBits | None = None
    """bits of a scale; None unless quantized."""
    block_type: BlockType | None = None
    """block type of llama.cpp, MLX or vLLM, instead of the three before it; None unless quantized for it."""
    compression_ratio: float
    """fraction of this layer's parameters removed, [0, 1)."""
    reconstruction_error: float
    """relative error of the layer's output over the calibration tokens, as predicted by the profile (without sequential
    compression and extra nonzeros).
    """
    weight_error: float
    """relative error in the original space, as predicted by the profile."""
    loss: float | None = None
    """predicted increase of the model's loss, nats per token; None if sensitivities were not measured. With the
    objective `prior`, see `Candidate.loss`.
    """
    achieved_error: float | None = None
    """as `reconstruction_error`, for the stored layer; see `LayerOutcome`. 0 if dense."""
    frontier: Annotated[tuple[FrontierPoint, ...], Field(repr=False)] = ()
    """the candidates that the knapsack chose from, by falling cost; see `FrontierPoint`. Left out where there are more
    than 2,000 layers, as they would take most of the report.
    """
    input_group: str
    """first layer that reads the same input."""
    dictionary: str | None = None
    """the layer that stores the dictionary, if the dictionary is shared; None otherwise."""
    routed_tokens: int | None = None
    """calibration tokens that a router sent to this expert of a mixture; with 0 of them, it was compressed for what an
    average token of its block looks like. None for other layers.
    """

    @property
    def error(self) -> float:
        """Error of the stored layer's output, or the predicted one in reports from before it was measured."""
        return self.reconstruction_error if self.achieved_error is None else self.achieved_error


class ExportReport(FrozenModel):
    """One artifact folder."""

    kind: NamedExport
    """format of the files."""
    folder: Annotated[str, BeforeValidator(current_name)]
    """its name within the output folder."""
    stored_bytes: int
    """bytes of all its safetensors files, or of the GGUF file."""
    loading: LoadingReport | None = None
    """what its engine made of it; null if the engine was not there, and in reports from before this field existed."""

    @property
    def loading_text(self) -> str:
        """What its engine made of it, in a sentence."""
        return NOT_LOADED if self.loading is None else self.loading.summary


class TotalsReport(FrozenModel):
    """Sizes before and after."""

    compressible_parameters: int
    """parameters of the selected linear layers, and of embedding and head where they are among the layers."""
    kept_parameters: int
    """number of them that remain."""
    achieved_ratio: float
    """fraction of the compressible parameters removed, [0, 1)."""
    achieved_byte_ratio: float | None = None
    """fraction of the compressible layers' bytes removed, masks counted."""
    model_parameters: int
    """parameters of the whole model."""
    model_compression_ratio: float
    """fraction of the whole model's parameters removed, [0, 1)."""
    stored_bytes: int
    """bytes of all safetensors of the smallest export."""
    dense_bytes: int
    """bytes of all safetensors of the original."""
    original_bits: float | None = None
    """average bits, scales included, of the original's weights in few bits; null if it stores none."""

    @property
    def original_text(self) -> str:
        """Name of the original in tables, with its bits where people would expect 16: `original: 8 bits`."""
        return "original" if self.original_bits is None else f"original: {self.original_bits:.3g} bits"


class CompressionReport(FrozenModel):
    """All information needed to understand and repeat a compression."""

    # A constant would be `1and` in the Python that openapi-python-client generates, a syntax warning.
    report_version: Annotated[Literal[1], WithJsonSchema({"type": "integer", "enum": [1]})] = 1
    """version of this layout."""
    rocket_version: str
    """version of the library."""
    fingerprint: str
    """hash of model, calibration, settings and version."""
    model: str
    """folder name or repository id as requested."""
    model_class: str = "AutoModelForCausalLM"
    """transformers class that loads the artifacts."""
    revision: str | None
    """commit of the repository, or the hash of the folder's weights."""
    settings: CompressionConfig
    """all settings."""
    calibration: CalibrationReport
    """the calibration data."""
    stages: tuple[StageReport, ...]
    """cost of each stage, in order."""
    allocation: AllocationReport
    """result of the knapsack."""
    totals: TotalsReport
    """sizes before and after."""
    coverage: Coverage | None = None
    """how much of the model was selected; None in reports from before this field existed."""
    exports: tuple[ExportReport, ...]
    """artifacts written."""
    tensors: tuple[TensorGroup, ...] = ()
    """what became of every tensor of the original in the artifact that the engine reads; empty in older reports."""
    layers: tuple[LayerReport, ...]
    """one entry per compressible layer, in model order; then those of `tables`."""
    tables: tuple[str, ...] = ()
    """token embedding and head, if the target could be met by quantizing them; they are the last of `layers`."""
    skipped: Annotated[dict[str, str], Field(default_factory=dict)]
    """layers that were left alone, with the reason."""
    refinement: tuple[BlockReport, ...] = ()
    """blocks that were refined, in model order; errors of `layers` are those before it. Empty without `refine`, and in
    reports from before this field existed.
    """
    healing: HealingReport | None = None
    """how the stored numbers were trained afterwards; errors of layers are those before. None if they were not."""
    evaluation: EvaluationReport | None = None
    """quality before and after; None if none was requested, and in reports from before this field existed."""
    rounds: tuple[LossRound, ...] = ()
    """sizes that were tried to meet a bound on the measured loss, in order; empty for other targets, and in older
    reports.
    """
    verdict: Verdict | None = None
    """whether the measured quality is accepted; None if no bounds were given, and in older reports."""
    speed: SpeedReport | None = None
    """speed and memory of the original and of each artifact; None if none was measured, and in older reports."""

    def __repr__(self) -> str:
        """Return one line, as an interpreter shows a result whose fields would fill pages."""
        sizes = f"{bytes_text(self.totals.dense_bytes)} → {bytes_text(self.totals.stored_bytes)}"
        return f"<{type(self).__name__} of {self.model}: {sizes}, {self.change_text}>"

    __str__ = __repr__

    @property
    def experts(self) -> dict[str, int]:
        """Calibration tokens that were routed to each expert of a mixture, by the name of its module."""
        return {
            layer.name.rpartition(".")[0]: layer.routed_tokens
            for layer in self.layers
            if layer.routed_tokens is not None
        }

    @property
    def calibration_reach(self) -> str | None:
        """What of the model the calibration data reach, and what to do about the rest; None if that is not known."""
        return self.calibration.reach(self.experts.values())

    @property
    def seconds(self) -> float:
        """Wall time of all stages."""
        return sum((stage.seconds for stage in self.stages), 0.0)

    @property
    def peak_memory_bytes(self) -> int:
        """Highest resident memory of all stages."""
        return max((stage.peak_memory_bytes for stage in self.stages), default=0)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk for each weight that the compressed layers have when dense, over all of them."""
        return 8 * sum(layer.stored_bytes for layer in self.layers) / self.totals.compressible_parameters

    @property
    def change_text(self) -> str:
        """What became of the layers: the fraction removed, or bits per weight if a layer is made of codes."""
        if any(layer.kind in CODE_KINDS for layer in self.layers):
            what = "linear layers and embeddings" if self.tables else "linear layers"
            return f"{what} in {self.bits_per_weight:.2f} bits per weight"
        return f"{percent_text(self.totals.achieved_ratio)} of the parameters of its linear layers removed"

    @property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """How the memory that was asked for is divided when the result runs; empty for other targets."""
        fit, engine = self.settings.fit, self.settings.reader
        if not isinstance(fit, FittedMemory):
            return ()
        stored = {export.kind: export.stored_bytes for export in self.exports}
        return fit.parts(engine.title, stored[engine.exports[0]])

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
