"""The stages that compute: profiling, allocation, factorization. Each picks up where the work folder ends."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.allocation import Allocation, allocate
from rocket_core.architectures import oriented_weight
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.devices import return_freed_memory
from rocket_core.errors import CorruptCheckpointError, IllConditionedGramError
from rocket_core.factorization import factorize_layer, prepare_layer
from rocket_core.inputs import CalibrationInputs
from rocket_core.modules import LayerFactors, layer_tensors
from rocket_core.pipeline.preflight import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.walk import BlockWalk
from rocket_core.pipeline.work_folder import BlockRecord, WorkFolder
from rocket_core.profiling import profile_layer
from rocket_core.whitening import Eigenbasis, GramStatistics, basis_from_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """All layer profiles of a model.

    Attributes:
        profiles: in model order.
        skipped: layers that turned out to be uncompressible, with the reason.
    """

    profiles: tuple[LayerProfile, ...]
    skipped: dict[str, str]


def profile_layers(run: Run, inputs: CalibrationInputs, work: WorkFolder, monitor: Monitor) -> Profiled:
    """Calibrates and profiles every layer, block by block.

    A layer's eigenbasis and profile are on disk before the next layer begins.

    Args:
        run: the run.
        inputs: calibration samples.
        work: where finished layers are and go.
        monitor: told of every layer.

    Raises:
        NonFiniteCalibrationError: NaN or infinity in a layer's activations.
        IllConditionedGramError: a Gram matrix that cannot be factorized.
        CompressionCancelledError: the caller wants the run to end.
    """
    walk = BlockWalk(run, inputs, monitor.pulse)
    total = sum(len(names) for names in run.layers)
    done = 0
    profiles: list[LayerProfile] = []
    skipped: dict[str, str] = {}
    for index, names in enumerate(run.layers):
        monitor.step(done / total, names[0] if names else None)
        record = work.block(index)
        if record is None:
            begun = functools.partial(_report_layer, monitor, done, total)
            finished = functools.partial(_hand_over, monitor, profiles)
            record = _profile_block(run, walk, work, index, begun, finished)
            work.save_block(index, record)
        else:
            for name in record.layers:
                profile = work.profile(name)
                assert profile is not None, name
                _hand_over(monitor, profiles, profile)
            monitor.skip_to((done + len(names)) / total)
        skipped |= record.skipped
        done += len(names)
    return Profiled(profiles=tuple(profiles), skipped=skipped)


def allocate_layers(run: Run, profiles: Sequence[LayerProfile], work: WorkFolder) -> Allocation:
    """Solves the knapsack, or takes the solution that a resumed run has found."""
    allocation = work.allocation()
    if allocation is None:
        config = run.config
        allocation = allocate(profiles, config.ratio, objective=config.objective, cap_slack=config.cap_slack)
        work.save_allocation(allocation)
    return allocation


def factorize_layers(
    run: Run,
    inputs: CalibrationInputs,
    work: WorkFolder,
    chosen: Sequence[tuple[LayerProfile, Candidate]],
    monitor: Monitor,
) -> None:
    """Factorizes every layer that the allocation does not leave dense, block by block.

    Args:
        run: the run.
        inputs: calibration samples, needed where an eigenbasis was not kept.
        work: where eigenbases are and factors go.
        chosen: each layer with its candidate.
        monitor: told of every layer.

    Raises:
        CompressionCancelledError: the caller wants the run to end.
    """
    walk = BlockWalk(run, inputs, monitor.pulse)
    candidates = {profile.name: candidate for profile, candidate in chosen if candidate.kind == "factored"}
    done = 0
    for index, names in enumerate(run.layers):
        pending = [name for name in names if name in candidates and work.factors(name) is None]
        statistics: dict[str, GramStatistics] = {}
        if not all(work.has_basis(name) for name in pending):
            statistics, _ = walk.statistics(index, names)
        finished = sum(name in candidates for name in names) - len(pending)
        if finished:
            done += finished
            monitor.skip_to(done / len(candidates))
        for name in pending:
            monitor.step(done / len(candidates), name)
            weight = _load_weight(run, name)
            basis = work.basis(name) or _compute_basis(run, weight, statistics[name])
            factors = _factors(run, weight, basis, candidates[name])
            work.save_factors(name, layer_tensors(factors, run.dtype))
            del weight, basis, factors
            return_freed_memory()
            done += 1


def _report_layer(monitor: Monitor, done: int, total: int, ahead: int, name: str) -> None:
    monitor.step((done + ahead) / total, name)


def _hand_over(monitor: Monitor, profiles: list[LayerProfile], profile: LayerProfile) -> None:
    monitor.profiled(len(profiles), profile)
    profiles.append(profile)


def _profile_block(
    run: Run,
    walk: BlockWalk,
    work: WorkFolder,
    index: int,
    on_layer: Callable[[int, str], None],
    on_profile: Callable[[LayerProfile], None],
) -> BlockRecord:
    names = run.layers[index]
    if not names:
        return BlockRecord(layers=(), skipped={})
    statistics, leaders = walk.statistics(index, names)
    skipped = {name: "never called through forward" for name in names if name not in statistics}
    finished: list[str] = []
    for position, name in enumerate(names):
        # Popped, so that a Gram matrix is freed with the last layer that needs it.
        layer_statistics = statistics.pop(name, None)
        if layer_statistics is None:
            continue
        on_layer(position, name)
        profile = work.profile(name)
        if profile is None:
            profile = _profile_one(run, work, name, leaders[name], layer_statistics)
            return_freed_memory()
        on_profile(profile)
        finished.append(name)
    return BlockRecord(layers=tuple(finished), skipped=skipped)


def _profile_one(run: Run, work: WorkFolder, name: str, leader: str, statistics: GramStatistics) -> LayerProfile:
    weight = _load_weight(run, name)
    d_in, d_out = weight.shape
    with _naming_the_layer(name):
        basis = _compute_basis(run, weight, statistics)
        work.save_basis(name, basis, quota=run.config.statistics_quota_bytes)
        layer = prepare_layer(weight, basis, run.factorizer, dtype=run.precision)
        candidates = profile_layer(
            layer,
            objective=run.config.objective,
            itemsize=run.dtype.itemsize,
            dense_bytes=run.stored_bytes(name),
        )
    profile = LayerProfile(
        name=name, d_in=d_in, d_out=d_out, input_group=leader, tokens=statistics.tokens, candidates=candidates
    )
    work.save_profile(profile)
    return profile


@contextmanager
def _naming_the_layer(name: str) -> Iterator[None]:
    try:
        yield
    except (IllConditionedGramError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # exported
        raise IllConditionedGramError(f"layer {name}: {error}") from error


def _compute_basis(run: Run, weight: Float[Tensor, "d_in d_out"], statistics: GramStatistics) -> Eigenbasis:
    """The eigenbasis as it is kept on disk: profiling and factorization must see the same digits."""
    basis = basis_from_statistics(weight, statistics, shrinkage=run.config.shrinkage)
    return Eigenbasis(directions=basis.directions.to(run.precision), singular_values=basis.singular_values)


def _factors(run: Run, weight: Float[Tensor, "d_in d_out"], basis: Eigenbasis, candidate: Candidate) -> LayerFactors:
    assert candidate.rank is not None
    assert candidate.nnz is not None
    basis = Eigenbasis(directions=basis.directions.to(run.device), singular_values=basis.singular_values.to(run.device))
    layer = prepare_layer(weight, basis, run.factorizer, dtype=run.precision)
    factorization = factorize_layer(layer, candidate.rank, candidate.nnz)
    return LayerFactors(
        dictionary=factorization.dictionary(),
        coefficients=factorization.coefficients,
        support=factorization.support,
    )


def _load_weight(run: Run, name: str) -> Float[Tensor, "d_in d_out"]:
    module = run.architecture.model.get_submodule(name)
    run.loader.load([name])
    weight = oriented_weight(module)
    run.loader.unload(module)
    if not bool(torch.isfinite(weight).all()):
        raise CorruptCheckpointError(
            f"the weight of layer {name} has NaN or infinite entries; fetch the checkpoint again, or ignore the layer"
        )
    return weight
