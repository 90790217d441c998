"""Compression of what is allocated, once or in rounds until a measured loss is within its bound."""

from collections.abc import Sequence
from dataclasses import dataclass

from rocket_core.allocation import Allocation, chosen
from rocket_core.allocation.loss_search import next_step
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.linalg.rough_products import fast_products
from rocket_core.pipeline.devices.messages import CompressBlocks
from rocket_core.pipeline.devices.processes import DeviceProcesses
from rocket_core.pipeline.prepared_run import PreparedRun
from rocket_core.pipeline.report_builder import layer_reports
from rocket_core.pipeline.stages.artifact_size import unallocated_bytes
from rocket_core.pipeline.stages.compress import compress_layers
from rocket_core.pipeline.stages.evaluate import evaluate_export
from rocket_core.pipeline.stages.export import stored_bytes, write_export
from rocket_core.pipeline.stages.sequential.compression import SequentialCompression
from rocket_core.pipeline.stages.token_tables import compress_tables
from rocket_core.pipeline.stages.units import CodedSizes, group_units
from rocket_core.pipeline.state.loss_rounds import begin_round, finished_rounds, save_round
from rocket_core.report.loss_rounds import LossRound
from rocket_core.sizes.target import ByLoss, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """What is known before layers are chosen.

    Attributes:
        profile: profile of the model.
        skipped: layers that cannot be compressed, with the reason.
        others: processes on further devices.
    """

    profile: ModelProfile
    skipped: dict[str, str]
    others: DeviceProcesses


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenLayers:
    """What was chosen for each layer.

    Attributes:
        allocation: the solution of the knapsack.
        decided: profiles of the layers that it decides.
        selected: each of them with its candidate.
        profiled: number of profiled layers that are not token tables.
        skipped: layers that cannot be compressed, with the reason.
    """

    allocation: Allocation
    decided: Sequence[LayerProfile]
    selected: Sequence[tuple[LayerProfile, Candidate]]
    profiled: int
    skipped: dict[str, str]


def compress_chosen(
    prepared: PreparedRun, target: Target, allocation: Allocation, profiled: Profiled, *, is_result: bool = True
) -> ChosenLayers:
    """Leave all layers that an allocation chooses in the work folder, as compressed.

    Args:
        prepared: the run.
        target: what the allocation is for.
        allocation: the choice.
        profiled: the profiled layers.
        is_result: whether the observer is told, which knows one allocation of a run.
    """
    run, work, monitor = prepared.run, prepared.work, prepared.monitor
    decided = profiled.profile.layers_for(target)
    selected = chosen(decided, allocation, itemsize=run.dtype.itemsize)
    if is_result:
        monitor.observer.on_allocation([(profile.name, candidate) for profile, candidate in selected])
    with monitor.stage("factorizing"), fast_products():
        units = compress_tables(run, prepared.calibration, work, group_units(selected), monitor)
        left = unallocated_bytes(run, allocation, selected)
        if run.config.sequential:
            sizes = CodedSizes(work, units, left)
            SequentialCompression(run, prepared.calibration, work, units, sizes, monitor).complete()
        else:
            compression = CompressBlocks(units=tuple(units), left=left)
            compress_layers(run, prepared.calibration, work, compression, monitor, profiled.others)
    return ChosenLayers(
        allocation=allocation,
        decided=decided,
        selected=selected,
        profiled=len(profiled.profile.layers),
        skipped=profiled.skipped,
    )


def compress_within_loss(prepared: PreparedRun, target: ByLoss, profiled: Profiled) -> ChosenLayers:
    """Leave the layers of the smallest result in the work folder whose measured loss is within a bound.

    Each round allocates for a predicted loss, compresses what that changes, writes the artifact that the evaluation
    measures, and measures it. See `rocket_core.allocation.loss_search`.

    Raises:
        InfeasibleBudgetError: no size is within the bound.
    """
    work, monitor = prepared.work, prepared.monitor
    predictor = profiled.profile.predictor()
    while True:
        monitor.begin_round()
        with monitor.stage("allocating"):
            rounds, before = finished_rounds(work), work.allocation()
            step = next_step(rounds, target, predictor.within_loss)
            if before != step.allocation:
                begin_round(work, step.allocation, _changed(prepared, profiled, before, step.allocation))
        found = compress_chosen(prepared, target, step.allocation, profiled, is_result=step.is_result)
        if step.is_result:
            return found
        save_round(work, _measured(prepared, target, found, step.sought))


def _changed(prepared: PreparedRun, profiled: Profiled, before: Allocation | None, allocation: Allocation) -> list[str]:
    """Return the layers that are to be compressed again when one allocation replaces another."""
    predictor = profiled.profile.predictor()
    selected = predictor.chosen(allocation)
    kept: set[str] = set()
    # In sequential compression, each layer is fitted to what the layers before it return.
    if before is not None and not prepared.run.config.sequential:
        known = group_units(predictor.chosen(before))
        kept.update(name for unit in group_units(selected) if unit in known for name in unit.names)
    return [layer.name for layer, _ in selected if layer.name not in kept]


def _measured(prepared: PreparedRun, target: ByLoss, found: ChosenLayers, sought: float) -> LossRound:
    """Return what is measured of the artifact that the evaluation reads."""
    run, work, monitor = prepared.run, prepared.work, prepared.monitor
    assert prepared.plan is not None, "a bound on a measured loss implies an evaluation"
    layers = layer_reports(found.allocation, found.decided, found.selected, work, work.refined_blocks())
    kind = run.config.evaluated_export
    with monitor.stage("exporting"):
        folder = write_export(run, work, kind, {layer.name: layer for layer in layers}, monitor)
    with monitor.stage("evaluating"):
        report = evaluate_export(run, prepared.plan.of_text, {kind: folder}, work, monitor)
    measured = report.difference.kl_divergence
    if target.measure == "max_perplexity_increase":
        before, after = report.before.negative_log_likelihood, report.after.negative_log_likelihood
        measured = None if before is None or after is None else after - before
    assert measured is not None, "the model predicts tokens"
    return LossRound(
        sought=sought,
        predicted=found.allocation.total_error,
        measured=measured,
        stored_bytes=stored_bytes(folder),
    )
