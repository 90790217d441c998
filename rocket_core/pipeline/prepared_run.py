"""A run that has passed all checks: its inputs and plans, and its claimed work folder."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.preflight import calibration_inputs
from rocket_core.pipeline.profile_reuse import RunProfileCache
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.requirements import (
    check_benchmark,
    check_evaluation,
    check_healing,
    expected_seconds,
    usable_devices,
)
from rocket_core.pipeline.run_coverage import coverage_of_run
from rocket_core.pipeline.stages.evaluate import EvaluationPlan, plan_evaluation
from rocket_core.pipeline.stages.healing.layers import plan_layer_healing
from rocket_core.pipeline.stages.healing.plan import HealingPlan
from rocket_core.pipeline.stages.publish import check_output_free
from rocket_core.pipeline.state.healing_state import HealingState
from rocket_core.pipeline.state.profile_cache import ProfileCache, profile_identity
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.system.devices import free_memory
from rocket_core.system.machine import gibibytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A validated run with its claimed work folder.

    Attributes:
        run: the run.
        identity: identity of its work.
        output: the output folder.
        work: the claimed work folder.
        monitor: notified of every step.
        calibration: calibration inputs.
        healing: the planned healing; None if nothing is trained.
        plan: the planned evaluation; None if the result is not evaluated.
        profile_cache: the cached profile that the run uses or creates.
    """

    run: Run
    identity: RunIdentity
    output: Path
    work: WorkFolder
    monitor: Monitor
    calibration: CalibrationInputs
    healing: HealingPlan | None
    plan: EvaluationPlan | None
    profile_cache: RunProfileCache


def prepare(
    run: Run,
    identity: RunIdentity,
    output: Path,
    work: WorkFolder,
    monitor: Monitor,
    *,
    resume: bool,
    token: str | None,
    profiles: ProfileCache | None,
) -> PreparedRun:
    """Raise an error if the run cannot be finished, otherwise claim the work folder."""
    work.check(identity, resume=resume)
    check_output_free(output, work, run.config.export)
    profile_cache = RunProfileCache(profiles, profile_identity(identity, run.method))
    calibration = profile_cache.inputs(work) or calibration_inputs(run, work, token=token)
    healing = plan_layer_healing(run, work, token=token)
    plan = plan_evaluation(run, token=token)
    needed = profile_cache.check_resources(run, calibration, output, held=work.stored_bytes).memory_bytes
    run = _on_usable_devices(run, needed, monitor)
    if run.device.type == "cpu":
        needed *= 1 + len(run.others)
    if healing is not None:
        needed = max(needed, check_healing(healing, run.source.name, run.device, output))
    for warning in (coverage_of_run(run).warning, *_warnings_of_few_bits(run)):
        if warning is not None:
            monitor.observer.on_warning(warning)
    monitor.observer.on_requirements(max(needed, check_evaluation(run, plan, output), check_benchmark(run)))
    monitor.expect(expected_seconds(run, len(calibration), healing, plan))
    work.claim(identity, calibration)
    if healing is not None:
        HealingState.within(work.path).save_windows(healing.windows)
    profile_cache.restore_into(work, calibration)
    return PreparedRun(
        run=run,
        identity=identity,
        output=output,
        work=work,
        monitor=monitor,
        calibration=calibration,
        healing=healing,
        plan=plan,
        profile_cache=profile_cache,
    )


def _on_usable_devices(run: Run, memory_bytes: int, monitor: Monitor) -> Run:
    """Return the run on the devices that have enough memory, after warning of others."""
    usable = usable_devices(run, memory_bytes)
    missing = Counter(run.others) - Counter(usable)
    for device in missing:
        monitor.observer.on_warning(
            f"{device} takes no part: a process on it needs about {gibibytes(memory_bytes)} of memory, and "
            f"{gibibytes(free_memory(device))} are free there"
        )
    return replace(run, others=usable)


def _warnings_of_few_bits(run: Run) -> Iterator[str]:
    """Yield what may surprise about a checkpoint that stores weights in few bits."""
    coded, bits = run.checkpoint.coded, run.checkpoint.coded_bits
    if coded is None:
        return
    if coded.is_approximation:
        yield (
            f"{run.source.name} is already quantized ({coded.title}, {bits:.3g} bits): errors of that remain, and are "
            "not in the measured quality; better start from the original floating-point weights"
        )
    if run.config.budget != "bytes":
        yield (
            f"{run.source.name} stores weights in {bits:.3g} bits, and the result has what remains of them in "
            f"{8 * run.dtype.itemsize}: it may be larger; ask for a size (--size), so that layers are quantized"
        )
