"""Compression of the allocated layers, each for the inputs of the dense model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.inputs import CalibrationInputs
from rocket_core.candidates import CODE_KINDS
from rocket_core.layers import LayerEntry, LayerFactors, StoredWeight, layer_tensors
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import CompressedLayer, LayerProblem, Method
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.layer_inputs import layer_problem, naming_the_layer
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.coded_sizes import CodedSizes
from rocket_core.pipeline.stages.units import CompressionUnit, shared_name
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerOutcome
from rocket_core.system.devices import return_freed_memory

# Kinds that are computed from the Gram matrix of the input; the others from the eigenbasis.
_NEED_GRAM = CODE_KINDS | {"sparse"}


def compress_layers(
    run: Run,
    inputs: CalibrationInputs,
    work: WorkFolder,
    units: Sequence[CompressionUnit],
    sizes: CodedSizes,
    monitor: Monitor,
) -> None:
    """Compress every layer that the allocation does not leave dense, block by block.

    Args:
        run: the run.
        inputs: calibration samples, needed if statistics were not stored.
        work: work folder with the statistics, to which factors are written.
        units: the units to compress.
        sizes: bytes of entropy-coded layers.
        monitor: notified of every layer.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
    """
    walk = BlockWalk(run, inputs, monitor.pulse)
    method = run.method
    total = max(1, len(units))
    done = 0
    for index, names in enumerate(run.layers):
        here = [unit for unit in units if unit.names[0] in names]
        pending = [unit for unit in here if not is_finished(work, unit)]
        statistics: dict[str, GramStatistics] = {}
        if not all(_has_statistics(work, unit) for unit in pending):
            statistics, _ = walk.statistics(index, names, input_grams=method.needs_input_gram)
        done += len(here) - len(pending)
        if pending != here:
            monitor.skip_to(done / total)
        for unit in pending:
            monitor.step(done / total, unit.names[0])
            with naming_the_layer(unit.names[0]):
                problem = _problem(run, work, unit, statistics)
                result = compress_unit(method, problem, sizes.sized(unit))
                achieved = AchievedErrors(errors=result.errors.cpu(), energies=output_energies(problem))
                save(run, work, unit, result.factors, achieved)
            del problem
            return_freed_memory()
            done += 1


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


def save(run: Run, work: WorkFolder, unit: CompressionUnit, factors: StoredWeight, achieved: AchievedErrors) -> None:
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
        tensors = layer_tensors(own, run.dtype)
        codes = None
        if isinstance(own, RoundedWeight):
            coded_bytes = tensors["weight"].numel() if own.entropy_coded else None
            codes = LayerEntry.of_codes(own.scales.format, own.scales.exponent, coded_bytes)
        work.save_factors(name, tensors, codes=codes)
        work.save_outcome(name, _outcome(own, tensors, achieved.relative(part)))


def _split(run: Run, unit: CompressionUnit, factors: StoredWeight) -> Iterator[StoredWeight]:
    """Yield the factors or codes of each layer of a unit."""
    if len(unit.names) == 1:
        yield factors
        return
    assert isinstance(factors, LayerFactors), "layers share nothing but dictionaries"
    begin = 0
    for index, name in enumerate(unit.names):
        part = slice(begin, begin + run.architecture.shape(name)[1])
        begin = part.stop
        yield LayerFactors(
            dictionary=factors.dictionary,
            coefficients=factors.coefficients[:, part],
            support=None if factors.support is None else factors.support[:, part],
            dictionary_owner=unit.names[0] if index else None,
        )


def output_energies(problem: LayerProblem) -> Tensor:
    """Return ‖S w_j‖² of each output j, with output weights, in float64."""
    if problem.statistics.gram is None:
        basis = problem.eigenbasis()
        return (basis.directions.double().square() @ basis.singular_values.double().square()).cpu()
    weight = problem.scaled_weight.to(problem.precision)
    return (weight * (problem.gram() @ weight)).sum(dim=0, dtype=torch.float64).cpu()


def _outcome(stored: StoredWeight, tensors: dict[str, Tensor], error: float) -> LayerOutcome:
    nnz = math.prod(stored.shape) if isinstance(stored, RoundedWeight) else tensors["weight"].numel()
    atoms = tensors["weight_u"].numel() if "weight_u" in tensors else 0
    return LayerOutcome(
        nnz=nnz,
        kept_parameters=nnz + atoms,
        stored_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        achieved_error=error,
    )


def _has_statistics(work: WorkFolder, unit: CompressionUnit) -> bool:
    if unit.candidates[0].kind in _NEED_GRAM:
        return work.has_gram(unit.input_group)
    return work.has_basis(_basis_name(unit))


def _basis_name(unit: CompressionUnit) -> str:
    return unit.names[0] if unit.candidates[0].dictionary is None else shared_name(unit.names[0])


def _problem(run: Run, work: WorkFolder, unit: CompressionUnit, statistics: dict[str, GramStatistics]) -> LayerProblem:
    sums = statistics.get(unit.names[0])
    if sums is None:
        profile = work.profile(unit.names[0])
        assert profile is not None
        gram = work.gram(unit.input_group) if unit.candidates[0].kind in _NEED_GRAM else None
        gram = None if gram is None else gram.to(run.device)
        energy = torch.empty(0) if gram is None else gram.diagonal()
        sums = GramStatistics(tokens=profile.tokens, gram=gram, output_gram=None, input_energy=energy)
    return layer_problem(run, work, unit.names, sums, basis=work.basis(_basis_name(unit)))
