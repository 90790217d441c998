"""Healing of what a run has compressed, before it is exported."""

import shutil
from collections.abc import Mapping

from rocket_core.checkpoint import TensorEntry
from rocket_core.config import CompressionConfig
from rocket_core.evaluation import open_model
from rocket_core.inspection.checks.preconditions import CALIBRATION_WINDOW_LENGTH
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.export import write_unhealed
from rocket_core.pipeline.stages.healing.artifact import finished_healing, heal_artifact
from rocket_core.pipeline.stages.healing.plan import HealingPlan, plan_healing
from rocket_core.pipeline.stages.stored_weight import stored_tensors
from rocket_core.pipeline.state.healing_state import HealingState
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.healing import HealingReport
from rocket_core.report.schema import LayerReport


def healing_passes(config: CompressionConfig) -> float | None:
    """Return the tokens that healing reads, in multiples of those of the calibration; None if nothing is healed."""
    if config.heal_tokens is None:
        return None
    length = config.calibration.sequence_length or CALIBRATION_WINDOW_LENGTH
    return config.heal_tokens / (config.calibration.samples * length)


def plan_layer_healing(run: Run, work: WorkFolder, *, token: str | None) -> HealingPlan | None:
    """Draw the text of healing, or take that of the run that this one resumes.

    Args:
        run: the run.
        work: its work folder.
        token: the Hub's token, for gated data; None uses that of this machine's user, if any.

    Returns:
        The plan; None if nothing is healed.

    Raises:
        RocketError: see `plan_healing`.
    """
    settings = run.config.healing
    if settings is None or run.config.target is None:
        return None
    windows = HealingState.within(work.path).windows() if work.is_claimed else None
    return plan_healing(open_model(run.source.folder), run.architecture, settings, windows=windows, token=token)


def heal_layers(
    run: Run, plan: HealingPlan, layers: Mapping[str, LayerReport], work: WorkFolder, monitor: Monitor
) -> HealingReport:
    """Heal the compressed layers, norms and biases of a run in its work folder, from which all exports are written.

    Args:
        run: the run.
        plan: the text and the schedule.
        layers: every compressible layer by name, all of them compressed.
        work: work folder with the factors, which are replaced.
        monitor: notified of every step.

    Raises:
        CompressionCancelledError: the caller has cancelled the run; a checkpoint was stored.
        RocketError: see `heal_artifact`.
    """
    state = HealingState.within(work.path)
    finished = finished_healing(state, monitor)
    if finished is None:
        finished = _heal(run, plan, layers, work, state, monitor)
    healed, report = finished
    # A run that was stopped before its end does this again: refinement puts its own numbers in place on resuming.
    _replace_factors(run, [name for name, layer in layers.items() if layer.kind != "dense"], work, healed)
    return report


def _heal(
    run: Run,
    plan: HealingPlan,
    layers: Mapping[str, LayerReport],
    work: WorkFolder,
    state: HealingState,
    monitor: Monitor,
) -> tuple[dict[str, TensorEntry], HealingReport]:
    folder = write_unhealed(run, work, layers, on_tensor=lambda _key: monitor.pulse())
    try:
        return heal_artifact(plan, open_model(folder), open_model(run.source.folder), run.device, state, monitor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace_factors(run: Run, names: list[str], work: WorkFolder, healed: Mapping[str, TensorEntry]) -> None:
    for name in names:
        base, parts = run.disk_name(name), stored_tensors(work, name)
        trained = {part: healed[key] for part in parts if (key := f"{base}.{part}") in healed}
        if trained:
            tensors = {part: entry.read() for part, entry in (parts | trained).items()}
            work.save_factors(name, tensors, codes=work.codes(name))
