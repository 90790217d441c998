"""Compression of the allocated layers, each for the inputs of the dense model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.candidates import CODE_KINDS
from rocket_core.estimates.duration import layer_parts
from rocket_core.exports.gguf_blocks import pack_blocks
from rocket_core.layers import (
    LayerEntry,
    LayerFactors,
    approximation,
    coded_entry,
    layer_tensors,
    round_values,
)
from rocket_core.linalg.block_codes import BlockWeight
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.prepared_gram import PreparedGram
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import CompressedLayer, CompressedWeight, LayerProblem, Method
from rocket_core.methods.sampled_outputs import output_importance
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.devices.messages import CompressBlocks
from rocket_core.pipeline.devices.processes import DeviceProcesses
from rocket_core.pipeline.layer_inputs import layer_problem, naming_the_layer
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.stored_weight import block_key
from rocket_core.pipeline.stages.units import CodedSizes, CompressionUnit, shared_name
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerOutcome
from rocket_core.sizes.budget import Shape
from rocket_core.system.process_memory import return_grown_memory

# Kinds that are computed from the Gram matrix of the input alone; the others from the eigenbasis, unless codes.
_NEED_GRAM = CODE_KINDS | {"sparse"}


def compress_layers(
    run: Run,
    inputs: CalibrationInputs,
    work: WorkFolder,
    compression: CompressBlocks,
    monitor: Monitor,
    others: DeviceProcesses,
) -> None:
    """Compress every layer that the allocation does not leave dense, block by block.

    Args:
        run: the run.
        inputs: calibration samples, needed if statistics were not stored.
        work: work folder with the statistics, to which factors are written.
        compression: the units to compress.
        monitor: notified of every layer.
        others: processes that compress blocks as well.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
    """

    def is_complete() -> bool:
        return all(is_finished(work, unit) for unit in compression.units)

    with others.working(compression, monitor, is_complete):
        compress_blocks(run, inputs, work, compression, monitor)
    if not is_complete():
        # What a failed process left.
        compress_blocks(run, inputs, work, compression, monitor, shares=False)


def compress_blocks(
    run: Run,
    inputs: CalibrationInputs,
    work: WorkFolder,
    compression: CompressBlocks,
    monitor: Monitor,
    *,
    shares: bool = True,
) -> None:
    """Compress the blocks that no process has compressed, or is compressing, one after another.

    Args:
        run: the run.
        inputs: calibration samples, needed if statistics were not stored.
        work: work folder with the statistics, to which factors are written.
        compression: the units to compress.
        monitor: notified of every layer.
        shares: whether to leave blocks to processes that are compressing them.
    """
    walk = BlockWalk(run, inputs, monitor.pulse, work.sensitivity)
    parts = layer_parts([_shape(run, unit) for unit in compression.units], compressing=True)
    done = 0
    grams = _Grams(run, work)
    for index, names in enumerate(run.layers):
        here = [unit for unit in compression.units if unit.names[0] in names]
        with work.lock_block("compress", index) as is_ours:
            is_free = is_ours or not shares
            pending = [unit for unit in here if is_free and not is_finished(work, unit)]
            statistics: dict[str, GramStatistics] = {}
            if not all(_has_statistics(run, work, unit) for unit in pending):
                input_grams = run.method.needs_input_gram or run.config.rounds_values
                statistics, _ = walk.statistics(index, names, input_grams=input_grams)
            done += len(here) - len(pending)
            if pending != here:
                monitor.skip_to(parts[done])
            sizes = CodedSizes.of_block(work, here, compression.units, compression.left)
            for unit in pending:
                monitor.step(parts[done], unit.names[0])
                _compress_one(run, work, sizes.sized(unit), statistics, grams)
                done += 1
        return_grown_memory()


def _compress_one(
    run: Run, work: WorkFolder, unit: CompressionUnit, statistics: dict[str, GramStatistics], grams: "_Grams"
) -> None:
    with naming_the_layer(unit.names[0]):
        problem = _problem(run, work, unit, statistics, grams)
        result = with_rounded_values(run, unit, problem, compress_unit(run.method, problem, unit))
        errors, energies = torch.stack([result.errors, problem.output_energies()]).cpu()
        save(run, work, unit, result.factors, AchievedErrors(errors=errors, energies=energies))
    grams.keep(unit.input_group, problem)


def _shape(run: Run, unit: CompressionUnit) -> Shape:
    """Return the shape of the concatenated weights of a unit."""
    shapes = [run.architecture.shape(name) for name in unit.names]
    return shapes[0][0], sum(d_out for _, d_out in shapes)


def is_finished(work: WorkFolder, unit: CompressionUnit) -> bool:
    """Return whether all layers of a unit are compressed."""
    return all(work.outcome(name) is not None for name in unit.names)


def compress_unit(method: Method, problem: LayerProblem, unit: CompressionUnit) -> CompressedLayer:
    """Compress a unit according to its candidates."""
    [candidate, *others] = unit.candidates
    if candidate.dictionary is not None:
        assert candidate.rank is not None
        return method.compress_shared(problem, candidate.rank, unit.nnz)
    assert not others
    return method.compress(problem, candidate)


def with_rounded_values(
    run: Run, unit: CompressionUnit, problem: LayerProblem, result: CompressedLayer
) -> CompressedLayer:
    """Return a compressed unit with its numbers rounded to `value_bits`, unless they are stored as they are."""
    if not run.config.rounds_values or not isinstance(result.factors, LayerFactors):
        return result
    widths = tuple(run.architecture.shape(name)[1] for name in unit.names)
    factors = round_values(result.factors, run.config.value_bits, widths)
    removed = problem.weight.to(problem.precision) - approximation(factors, problem.precision)
    return CompressedLayer(factors=factors, errors=output_errors(problem.gram(), removed) * output_importance(problem))


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedErrors:
    """Achieved errors for each output of a unit's layers, weighted as in the profile, in float64.

    Attributes:
        errors: squared error over the calibration tokens.
        energies: squared norm of the dense output over the calibration tokens.
    """

    errors: Float[Tensor, " d_out"]
    energies: Float[Tensor, " d_out"]

    def relative(self, part: slice) -> float:
        """Return the relative error of a range of outputs."""
        energy = float(self.energies[part].sum())
        return (max(0.0, float(self.errors[part].sum())) / energy) ** 0.5 if energy > 0 else 0.0


def save(
    run: Run, work: WorkFolder, unit: CompressionUnit, factors: CompressedWeight, achieved: AchievedErrors
) -> None:
    """Store the factors or codes of a unit's layers, and the outcome of each.

    Args:
        run: the run.
        work: the work folder.
        unit: the layers.
        factors: factors of all layers, concatenated, or the codes of a single layer.
        achieved: errors of all layers, concatenated.
    """
    begin = 0
    for name, own in zip(unit.names, _split(run, unit, factors), strict=True):
        part = slice(begin, begin + own.shape[1])
        begin = part.stop
        tensors, codes = _stored(own, run.dtype)
        work.save_factors(name, tensors, codes=codes)
        work.save_outcome(name, _outcome(own, tensors, achieved.relative(part)))


def _stored(weight: CompressedWeight, dtype: torch.dtype) -> tuple[dict[str, Tensor], LayerEntry | None]:
    """Return the tensors of a layer, and how codes among them are stored."""
    if isinstance(weight, BlockWeight):
        return {block_key(weight.scales.format.name): pack_blocks(weight)}, None
    tensors = layer_tensors(weight, dtype)
    if isinstance(weight, RoundedWeight):
        coded_bytes = tensors["weight"].numel() if weight.entropy_coded else None
        return tensors, LayerEntry.of_codes(weight.scales.format, weight.scales.exponent, coded_bytes)
    return tensors, coded_entry(weight) if weight.value_codes else None


def _split(run: Run, unit: CompressionUnit, factors: CompressedWeight) -> Iterator[CompressedWeight]:
    """Yield the factors or codes of each layer of a unit."""
    if len(unit.names) == 1:
        yield factors
        return
    assert isinstance(factors, LayerFactors), "layers share nothing but dictionaries"
    begin = 0
    for index, name in enumerate(unit.names):
        part = slice(begin, begin + run.architecture.shape(name)[1])
        begin = part.stop
        yield replace(
            factors,
            value_codes=factors.value_codes[index : index + 1],
            dictionary=factors.dictionary,
            coefficients=factors.coefficients[:, part],
            support=None if factors.support is None else factors.support[:, part],
            dictionary_owner=unit.names[0] if index else None,
        )


def output_energies(problem: LayerProblem) -> Tensor:
    """Return ‖S w_j‖² of each output j, with output weights, in float64."""
    return problem.output_energies().cpu()


def _outcome(stored: CompressedWeight, tensors: dict[str, Tensor], error: float) -> LayerOutcome:
    nnz = stored.nnz if isinstance(stored, LayerFactors) else math.prod(stored.shape)
    atoms = 0
    if isinstance(stored, LayerFactors) and stored.dictionary is not None and "weight_u" in tensors:
        atoms = stored.dictionary.numel()
    return LayerOutcome(
        nnz=nnz,
        kept_parameters=nnz + atoms,
        stored_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        achieved_error=error,
    )


def _has_statistics(run: Run, work: WorkFolder, unit: CompressionUnit) -> bool:
    if not run.config.calibrates:
        return True
    if _reads_gram(run, unit) and not work.has_gram(unit.input_group):
        return False
    return _needs_gram_alone(unit) or work.has_basis(_basis_name(unit))


def _reads_gram(run: Run, unit: CompressionUnit) -> bool:
    """Return whether a unit is computed from the Gram matrix of its input, perhaps next to the eigenbasis."""
    return _needs_gram_alone(unit) or run.config.rounds_values


def _needs_gram_alone(unit: CompressionUnit) -> bool:
    """Return whether the Gram matrix of its input suffices for a unit; factors of codes take the basis from it."""
    candidate = unit.candidates[0]
    return candidate.kind in _NEED_GRAM or candidate.bits is not None


def _basis_name(unit: CompressionUnit) -> str:
    return unit.names[0] if unit.candidates[0].dictionary is None else shared_name(unit.names[0])


class _Grams:
    """The Gram matrices on disk; the last one is kept with what is derived from it, for the next layer of its group."""

    def __init__(self, run: Run, work: WorkFolder) -> None:
        self._run = run
        self._work = work
        self._group: str | None = None
        self._gram: Tensor | None = None
        self._prepared: PreparedGram | None = None

    def keep(self, group: str, problem: LayerProblem) -> None:
        """Keep the Gram matrix of a layer, and forget that of another group."""
        self._group, self._gram, self._prepared = group, problem.statistics.gram, problem.prepared

    def read(self, group: str) -> Tensor | None:
        """Return the Gram matrix of a group, on the device; None if it is not on disk."""
        if self._gram is None or self._group != group:
            self._gram = self._prepared = None
            gram = self._work.gram(group)
            return None if gram is None else gram.to(self._run.device)
        return self._gram

    def prepared(self, group: str) -> PreparedGram | None:
        """Return the prepared Gram matrix of a group, if the layer before was of the same."""
        return self._prepared if self._group == group else None


def _problem(
    run: Run, work: WorkFolder, unit: CompressionUnit, statistics: dict[str, GramStatistics], grams: _Grams
) -> LayerProblem:
    sums = statistics.get(unit.names[0])
    if sums is None:
        profile = work.profile(unit.names[0])
        assert profile is not None
        gram = grams.read(unit.input_group) if run.config.calibrates and _reads_gram(run, unit) else None
        energy = torch.empty(0) if gram is None else gram.diagonal()
        sums = GramStatistics(tokens=profile.tokens, gram=gram, output_gram=None, input_energy=energy)
    prepared = None if sums.gram is None else grams.prepared(unit.input_group)
    return layer_problem(run, work, unit.names, sums, basis=work.basis(_basis_name(unit)), prepared=prepared)
