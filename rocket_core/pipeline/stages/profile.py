"""Profiling and allocation. Both stages continue from what is in the work folder."""

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import assert_never

from rocket_core.allocation import Allocation
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.candidates import Candidate, LayerProfile, SharedCandidate
from rocket_core.config import CompressionConfig, Objective
from rocket_core.estimates.duration import layer_parts
from rocket_core.linalg.prepared_gram import PreparedGram
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import Member, Method
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.devices.messages import ProfileBlocks
from rocket_core.pipeline.devices.processes import DeviceProcesses
from rocket_core.pipeline.layer_inputs import layer_problem, naming_the_layer, profiled_problem
from rocket_core.pipeline.layer_prior import named_groups, uncalibrated_statistics
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.artifact_size import fill_size
from rocket_core.pipeline.stages.token_tables import NEVER_CALLED, profile_table
from rocket_core.pipeline.stages.units import shared_name
from rocket_core.pipeline.state.records import BlockRecord
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.sizes.target import ByBits, ByBytes, ByFormat, ByLoss, ByRatio, Target
from rocket_core.system.process_memory import return_freed_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """All layer profiles of a model.

    Attributes:
        profiles: the profiles, in model order.
        tables: profiles of token embedding and head.
        skipped: layers that cannot be compressed, with the reason.
    """

    profiles: tuple[LayerProfile, ...]
    tables: tuple[LayerProfile, ...]
    skipped: dict[str, str]


def profile_layers(
    run: Run, inputs: CalibrationInputs, work: WorkFolder, monitor: Monitor, others: DeviceProcesses
) -> Profiled:
    """Calibrate and profile every layer, block by block.

    A layer's statistics and profile are on disk before the next layer starts.

    Args:
        run: the run.
        inputs: calibration samples.
        work: work folder for finished layers.
        monitor: notified of every layer.
        others: processes that profile blocks as well.

    Raises:
        NonFiniteCalibrationError: a layer's activations contain NaN or infinity.
        IllConditionedGramError: a Gram matrix cannot be factorized.
        CompressionCancelledError: the caller has cancelled the run.
    """
    found = ProfilesInOrder(run, work, monitor)
    with others.working(ProfileBlocks(), monitor, lambda: found.are_complete):
        walk = profile_blocks(run, inputs, work, found)
    if not found.are_complete:
        # What a failed process left.
        walk = profile_blocks(run, inputs, work, found, shares=False)
    found.add_finished()
    tables = _profile_tables(run, walk, inputs, work, found)
    layers = len(found.profiles) - tables
    return Profiled(
        profiles=tuple(found.profiles[:layers]), tables=tuple(found.profiles[layers:]), skipped=found.skipped
    )


class ProfilesInOrder:
    """The profiles of a run, handed to its observer in model order, whichever process has computed them.

    Args:
        run: the run.
        work: work folder with finished layers.
        monitor: notified of every layer.

    Attributes:
        monitor: notified of every layer.
        profiles: those reported so far.
        skipped: layers that cannot be compressed, with the reason.
    """

    def __init__(self, run: Run, work: WorkFolder, monitor: Monitor) -> None:
        self._run = run
        self._work = work
        self.monitor = monitor
        self._finished: set[int] = set()
        # The block whose profiles are reported next, and how many of them have been.
        self._block = self._within = 0
        self.profiles: list[LayerProfile] = []
        self.skipped: dict[str, str] = {}

    @property
    def finished(self) -> Set[int]:
        """Indices of the blocks that are profiled."""
        missing = set(range(len(self._run.layers))) - self._finished
        self._finished |= {index for index in missing if self._work.block(index) is not None}
        return self._finished

    @property
    def finished_layers(self) -> int:
        """Number of the layers of these blocks."""
        return sum(len(self._run.layers[index]) for index in self.finished)

    @property
    def are_complete(self) -> bool:
        """Whether all blocks are profiled."""
        return len(self.finished) == len(self._run.layers)

    def add(self, profile: LayerProfile) -> None:
        """Hand over a profile."""
        self.monitor.observer.on_profile(len(self.profiles), profile)
        self.profiles.append(profile)

    def add_of(self, block: int, profile: LayerProfile) -> None:
        """Hand over the next profile of an unfinished block, unless one before it is unfinished, too."""
        if block == self._block:
            self.add(profile)
            self._within += 1

    def add_finished(self) -> None:
        """Hand over the profiles of all finished blocks up to the first that is not."""
        while self._block < len(self._run.layers) and (record := self._work.block(self._block)) is not None:
            for name in record.layers[self._within :]:
                profile = self._work.profile(name)
                assert profile is not None, name
                self.add(profile)
            self.skipped |= record.skipped
            self._block, self._within = self._block + 1, 0


def profile_blocks(
    run: Run, inputs: CalibrationInputs, work: WorkFolder, found: ProfilesInOrder, *, shares: bool = True
) -> BlockWalk:
    """Profile the blocks that no process has profiled, or is profiling, one after another.

    Args:
        run: the run.
        inputs: calibration samples.
        work: work folder for finished layers.
        found: notified of every profile.
        shares: whether to leave blocks to processes that are profiling them.

    Returns:
        The hidden states, at the last block that this process has profiled.
    """
    monitor = found.monitor
    walk = BlockWalk(run, inputs, monitor.pulse, work.sensitivity)
    parts = _parts(run)
    earlier = frozenset(found.finished)
    for index, names in enumerate(run.layers):
        done = found.finished_layers
        monitor.step(parts[done], names[0] if names else None)
        if index in earlier:
            found.add_finished()
            monitor.skip_to(parts[done])
            continue
        with work.lock_block("profile", index) as is_ours:
            if (is_ours or not shares) and work.block(index) is None:
                on_layer = functools.partial(_report_layer, monitor, parts[done:])
                record = _profile_block(run, walk, work, index, on_layer, functools.partial(found.add_of, index))
                work.save_block(index, record)
        found.add_finished()
    return walk


def _parts(run: Run) -> Sequence[float]:
    """Return the parts of the stage that are done after each layer."""
    shapes = [run.architecture.shape(name) for names in run.layers for name in names]
    return layer_parts(shapes + [run.architecture.shape(table.name) for table in run.tables], compressing=False)


def _profile_tables(
    run: Run, walk: BlockWalk, inputs: CalibrationInputs, work: WorkFolder, found: ProfilesInOrder
) -> int:
    """Profile token embedding and head, and return the number of profiles."""
    parts, done, layers = _parts(run), found.finished_layers, len(found.profiles)
    for position, table in enumerate(run.tables):
        found.monitor.step(parts[done + position], table.name)
        profile = work.profile(table.name) or profile_table(run, walk, work, table, inputs)
        if profile is None:
            found.skipped[table.name] = NEVER_CALLED
        else:
            found.add(profile)
        return_freed_memory()
    return len(found.profiles) - layers


def allocate_layers(run: Run, target: Target, profile: ModelProfile, work: WorkFolder) -> Allocation:
    """Solve the knapsack, or return the solution of the run that is resumed.

    Args:
        run: the run.
        target: what to reach.
        profile: profile of the model.
        work: work folder for the solution.

    Raises:
        InfeasibleBudgetError: no choice of candidates is small enough.
    """
    allocation = work.allocation()
    if allocation is None:
        predictor = profile.predictor()
        match target:
            case ByBytes(target_bytes=size):
                allocation = fill_size(run, size, predictor)
            case ByRatio() | ByBits() | ByFormat() | ByLoss():
                allocation = predictor.allocate(target)
            case _:
                assert_never(target)
        work.save_allocation(allocation)
    return allocation


def objective_of(config: CompressionConfig) -> Objective:
    """Return what the knapsack sums over layers: the configured objective, or the output error for other methods."""
    return config.objective if config.method == "rocket" else "whitened"


def _report_layer(monitor: Monitor, parts: Sequence[float], ahead: int, name: str) -> None:
    monitor.step(parts[ahead], name)


@dataclass(kw_only=True, slots=True)
class _Calibrated:
    """Results of calibrating a block, removed layer by layer."""

    statistics: dict[str, GramStatistics]
    group_of: dict[str, str]
    called: tuple[str, ...]
    layers: dict[str, tuple[str, ...]] = field(init=False)
    groups: tuple[tuple[str, ...], ...] = field(init=False)
    members: dict[str, Member] = field(default_factory=dict)
    _prepared: tuple[str, PreparedGram] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Groups are named after their first layer in model order, whichever is called first.
        first = {group: name for name, group in reversed(list(self.group_of.items()))}
        self.group_of = {name: first[group] for name, group in self.group_of.items()}
        self.layers = {
            group: tuple(name for name, other in self.group_of.items() if other == group)
            for group in self.group_of.values()
        }
        self.groups = tuple(self.layers[first[group]] for group in self.called)

    def take(self, name: str) -> GramStatistics:
        """Remove and return a layer's statistics; a Gram matrix is freed with the last layer that needs it."""
        return self.statistics.pop(name)

    def prepared(self, group: str) -> PreparedGram | None:
        """Return the prepared Gram matrix of a group, if the layer before was of the same."""
        return self._prepared[1] if self._prepared is not None and self._prepared[0] == group else None

    def keep(self, group: str, prepared: PreparedGram | None) -> None:
        """Keep the prepared Gram matrix of a group, and forget that of another one."""
        self._prepared = None if prepared is None else (group, prepared)

    def first_layers_last(self, names: Sequence[str]) -> list[str]:
        """Return the names, each group's first layer after its others, because sharing depends on all their results."""
        order = list(names)
        for first, layers in self.layers.items():
            order.remove(first)
            order.insert(max((order.index(name) + 1 for name in layers[1:]), default=names.index(first)), first)
        return order


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
        return BlockRecord(layers=(), groups=(), skipped={})
    method = run.method
    if run.config.calibrates:
        statistics, group_of = walk.statistics(index, names, input_grams=method.needs_input_gram)
    else:
        statistics, group_of = uncalibrated_statistics(names), named_groups(run, names)
    calibrated = _Calibrated(
        statistics=statistics,
        group_of={name: group_of[name] for name in names if name in group_of},
        called=tuple(dict.fromkeys(group_of.values())),
    )
    skipped = {name: NEVER_CALLED for name in names if name not in calibrated.group_of}
    called = [name for name in names if name not in skipped]
    finished: list[str] = []
    for position, name in enumerate(calibrated.first_layers_last(called) if method.shares else called):
        on_layer(position, name)
        if work.profile(name) is None:
            _profile_one(run, work, method, name, calibrated)
        calibrated.statistics.pop(name, None)
        while len(finished) < len(called) and (profile := work.profile(called[len(finished)])) is not None:
            on_profile(profile)
            finished.append(profile.name)
    return BlockRecord(layers=tuple(finished), groups=calibrated.groups, skipped=skipped)


def _profile_one(run: Run, work: WorkFolder, method: Method, name: str, calibrated: _Calibrated) -> LayerProfile:
    statistics = calibrated.take(name)
    group = calibrated.group_of[name]
    with naming_the_layer(name):
        problem = profiled_problem(run, work, name, statistics, prepared=calibrated.prepared(group))
        candidates = method.profile(problem)
        calibrated.keep(group, problem.prepared)
        shared: tuple[SharedCandidate, ...] = ()
        if method.shares and len(calibrated.layers[group]) > 1:
            calibrated.members[name] = problem.as_member()
            if group == name:
                shared = _share(run, work, calibrated, name, statistics, candidates)
    if run.config.sequential:  # sequential compression computes its own statistics
        work.save_output_energies(name, statistics.output_energies(problem.weight.double()).cpu())
    else:
        quota = run.config.statistics_quota_bytes
        if problem.basis is not None:
            work.save_basis(name, problem.basis, quota=quota)
        if method.needs_input_gram and statistics.gram is not None:
            # Compression computes with it in this precision.
            work.save_gram(group, statistics.gram.to(run.precision), quota=quota)
    d_in, d_out = problem.shape
    dense = Candidate(
        kind="dense",
        kept_parameters=d_in * d_out,
        stored_bytes=run.stored_bytes(name),
        reconstruction_error=0.0,
        weight_error=0.0,
        loss=problem.predicted_loss_increase(0.0),
    )
    profile = LayerProfile(
        name=name,
        d_in=d_in,
        d_out=d_out,
        input_group=group,
        tokens=statistics.tokens,
        routed_tokens=statistics.routed,
        candidates=(dense, *candidates),
        shared=shared,
    )
    work.save_profile(profile)
    return profile


def _share(
    run: Run,
    work: WorkFolder,
    calibrated: _Calibrated,
    first: str,
    statistics: GramStatistics,
    own: Sequence[Candidate],
) -> tuple[SharedCandidate, ...]:
    """Return the shared candidates of a group.

    Args:
        run: the run.
        work: work folder with the profiles of all layers but the first.
        calibrated: what is known of them; of those that an earlier attempt has profiled it is computed again.
        first: the first layer of the group.
        statistics: statistics of their input.
        own: candidates of the first layer.
    """
    layers, prepared = calibrated.layers[first], calibrated.prepared(first)
    per_layer_candidates, members = [own], []
    for name in layers[1:]:
        profile = work.profile(name)
        assert profile is not None, name
        per_layer_candidates.append(profile.candidates)
    for name in layers:
        member = calibrated.members.pop(name, None)
        members.append(member or profiled_problem(run, work, name, statistics, prepared=prepared).as_member())
    problem = layer_problem(run, work, layers, statistics, prepared=prepared, members=members)
    shared = tuple(run.method.share(problem, first, per_layer_candidates))
    if not run.config.sequential and problem.basis is not None:
        work.save_basis(shared_name(first), problem.basis, quota=run.config.statistics_quota_bytes)
    return shared
