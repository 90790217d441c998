"""`compress` and `profile_model`: the stages in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rocket_core.allocation.predictor import ModelProfile
from rocket_core.checkpoint import ModelSource
from rocket_core.config import STAGES, CompressionConfig, with_evaluation
from rocket_core.errors import (
    CalibrationError,
    CheckpointError,
    IllConditionedGramError,
    InfeasibleBudgetError,
    InvalidConfigError,
)
from rocket_core.exports.output_folder import check_unused
from rocket_core.hub.repository import HubAccess, offline
from rocket_core.linalg.rough_products import fast_products
from rocket_core.pipeline.chosen_layers import ChosenLayers, Profiled, compress_chosen, compress_within_loss
from rocket_core.pipeline.devices.processes import DeviceProcesses
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.open_work import open_work
from rocket_core.pipeline.preflight import prepare_run, run_identity
from rocket_core.pipeline.prepared_run import PreparedRun, prepare
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.report_builder import (
    allocation_report,
    block_reports,
    calibration_report,
    layer_reports,
    model_profile,
    totals_report,
    verdict,
    without_paths,
)
from rocket_core.pipeline.requirements import check_needed, decoded_target
from rocket_core.pipeline.run_coverage import coverage_of_run
from rocket_core.pipeline.stages.accounting import account_for_tensors
from rocket_core.pipeline.stages.download import open_original
from rocket_core.pipeline.stages.engine_run import run_export
from rocket_core.pipeline.stages.evaluate import measure
from rocket_core.pipeline.stages.export import export_reports, write_export
from rocket_core.pipeline.stages.healing.layers import heal_layers, healing_passes
from rocket_core.pipeline.stages.profile import allocate_layers, profile_layers
from rocket_core.pipeline.stages.publish import check_same_measurements, finished_report, publish
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from rocket_core.pipeline.stages.trial_run import check_export
from rocket_core.pipeline.state.loss_rounds import finished_rounds
from rocket_core.pipeline.state.profile_cache import ProfileCache
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import CompressionReport, StageReport
from rocket_core.sizes.target import ByLoss, Target
from rocket_core.system.energy import EnergyMeter
from rocket_core.version import __version__


def compress(
    model: str | ModelSource,
    output: Path | str,
    config: CompressionConfig,
    *,
    revision: str | None = None,
    resume: bool = False,
    hub: HubAccess = HubAccess(),
    profiles: ProfileCache | None = None,
    meter: EnergyMeter | None = None,
    download: StageReport | None = None,
    observer: Observer | None = None,
) -> CompressionReport:
    """Compress a model and write the artifacts, each into its own folder under `output`.

    Memory is that of one block of the model; see `rocket_core.pipeline.requirements`. Finished layers are kept in
    `output/.rocket-work` until the artifacts are complete.

    Args:
        model: folder of a checkpoint, GGUF file, repository id on the Hub, or a model that was found with `find_model`.
        output: output folder; created if needed.
        config: all settings.
        revision: branch, tag or commit of a repository.
        resume: continue what an earlier run with the same settings left in `output`; the result is identical to the
            byte (on the CPU, with the same number of threads). If that run had finished, its report is returned.
        hub: credentials and cache directory for Hub access.
        profiles: profile cache: the profile of an earlier run with the same model, calibration and profiling settings
            is reused, and this run's is stored. It does not change the result. None disables it.
        meter: measures the energy of each stage, starting before the call; None leaves it out of the report.
        download: cost of downloading the model, if it was found before the call; its device is filled in.
        observer: notified of progress and results, and may end the run; see `Observer`. None shows a bar if standard
            error is a terminal or the code runs in a notebook.

    Returns:
        The report, which is also written to `output` and into each artifact's folder.

    Raises:
        RocketError: see `rocket_core.errors` for the kinds.
    """
    output, target, config = Path(output), config.target, with_evaluation(config)
    if target is None:
        raise InvalidConfigError(
            "specify a ratio, a target size in bytes (target_bytes), bits per weight (bits), a memory (fit), or a "
            "bound on the loss (max_kl or max_perplexity_increase)"
        )
    if not resume:
        check_unused(output, config.export)
    with (
        _open_run(output, config, observer, meter, download) as (work, monitor),
        open_original(model, output, revision, hub, config, monitor) as source,
    ):
        with monitor.stage("preflight"):
            with offline():
                run = prepare_run(source, config)
                # A fit has become a size.
                target = run.config.target or target
                check_needed(run, target)
            identity = run_identity(run)
            finished = finished_report(output, identity, resume=resume)
            if finished is not None:
                check_same_measurements(finished, config, output)
                return finished
            prepared = prepare(run, identity, output, work, monitor, resume=resume, token=hub.token, profiles=profiles)
        with offline():
            monitor.observer.on_offline()
            report = _compress(prepared, target)
        monitor.finish()
        return report


def profile_model(
    model: str | ModelSource,
    output: Path | str,
    config: CompressionConfig,
    *,
    profiles: ProfileCache,
    revision: str | None = None,
    resume: bool = False,
    hub: HubAccess = HubAccess(),
    meter: EnergyMeter | None = None,
    download: StageReport | None = None,
    observer: Observer | None = None,
) -> ModelProfile:
    """Run the part of a compression that precedes any ratio: calibrate, and profile all layers.

    A later `compress` with the same model, calibration and profiling settings starts from the result.

    Args:
        model: as in `compress`.
        output: folder for unfinished work, in `output/.rocket-work`, which is removed at the end.
        config: all settings, without a target.
        profiles: profile cache in which the profile is stored, or from which an existing one is reused.
        revision: branch, tag or commit of a repository.
        resume: as in `compress`.
        hub: as in `compress`.
        meter: as in `compress`.
        download: as in `compress`.
        observer: as in `compress`; its `on_costs` is called at the end.

    Returns:
        The profile of the model, which predicts the result of any ratio or size.

    Raises:
        RocketError: see `rocket_core.errors` for the kinds.
    """
    output = Path(output)
    if config.stores_one_format:
        raise InvalidConfigError(f"method {config.method} allocates nothing and needs no profile: compress the model")
    if config.target is not None:
        raise InvalidConfigError("a profile is for every ratio and size; leave the target out")
    with (
        _open_run(output, config, observer, meter, download) as (work, monitor),
        open_original(model, output, revision, hub, config, monitor) as source,
    ):
        with monitor.stage("preflight"):
            with offline():
                run = prepare_run(source, config)
            prepared = prepare(
                run, run_identity(run), output, work, monitor, resume=resume, token=hub.token, profiles=profiles
            )
        with offline():
            monitor.observer.on_offline()
            with DeviceProcesses(run, work) as others:
                profile, _ = _profile(prepared, others)
        monitor.finish()
        monitor.observer.on_costs(monitor.costs.stages)
        work.remove()
        return profile


@contextmanager
def _open_run(
    output: Path,
    config: CompressionConfig,
    observer: Observer | None,
    meter: EnergyMeter | None,
    download: StageReport | None,
) -> Iterator[tuple[WorkFolder, Monitor]]:
    """Yield the work folder of a run and its monitor; remove the folder of a run that failed without any layer."""
    optional = {
        "healing": config.heal_tokens is not None,
        "evaluating": config.evaluate is not None,
        "benchmarking": config.benchmark,
    }
    stages = STAGES if config.target is not None else STAGES[: STAGES.index("calibrating") + 1]
    monitor_of = partial(
        Monitor,
        stages=[stage for stage in stages if optional.get(stage, True)],
        refines=config.refine,
        healing_passes=healing_passes(config),
    )
    with open_work(output, config.device, observer, monitor_of, meter=meter, download=download) as (work, monitor):
        try:
            yield work, monitor
        except (CalibrationError, CheckpointError, IllConditionedGramError, InfeasibleBudgetError):
            if work.is_ours:
                work.remove_if_idle()
            raise


def _profile(prepared: PreparedRun, others: DeviceProcesses) -> tuple[ModelProfile, dict[str, str]]:
    """Return all layer profiles, after caching and reporting them, and the layers that cannot be compressed."""
    run, work, monitor = prepared.run, prepared.work, prepared.monitor
    if run.config.measures_sensitivities:
        with monitor.stage("differentiating"), fast_products():
            windows = run.config.gradient_windows(len(prepared.calibration))
            measure_sensitivities(run, prepared.calibration[-windows:], work, monitor, windows=windows)
    with monitor.stage("calibrating"), fast_products():
        profiled = profile_layers(run, prepared.calibration, work, monitor, others)
        prepared.profile_cache.store(work)
    profile = model_profile(run, prepared.profile_cache.identity, profiled, work)
    monitor.observer.on_profiled(profile)
    return profile, profiled.skipped


def _compress_layers(prepared: PreparedRun, target: Target) -> ChosenLayers:
    """Profile the model, allocate, and leave all compressed layers in the work folder."""
    with DeviceProcesses(prepared.run, prepared.work) as others:
        profile, skipped = _profile(prepared, others)
        profiled = Profiled(profile=profile, skipped=skipped, others=others)
        if isinstance(target, ByLoss):
            return compress_within_loss(prepared, target, profiled)
        with prepared.monitor.stage("allocating"):
            target = decoded_target(prepared.run, target)
            allocation = allocate_layers(prepared.run, target, profile, prepared.work)
        return compress_chosen(prepared, target, allocation, profiled)


def _compress(prepared: PreparedRun, target: Target) -> CompressionReport:
    run, work, monitor = prepared.run, prepared.work, prepared.monitor
    found = _compress_layers(prepared, target)
    refined = work.refined_blocks()
    layers = layer_reports(found.allocation, found.decided, found.selected, work, refined)
    by_name = {layer.name: layer for layer in layers}
    healing = None
    if prepared.healing is not None:
        with monitor.stage("healing"):
            healing = heal_layers(run, prepared.healing, by_name, work, monitor)
    with monitor.stage("exporting"):
        folders = {kind: write_export(run, work, kind, by_name, monitor) for kind in run.config.export}
        for kind, folder in folders.items():
            check_export(run, work, kind, folder, by_name, prepared.calibration, monitor)
        loaded = {kind: run_export(run, work, kind, folder, by_name, monitor) for kind, folder in folders.items()}
    evaluation, speed = measure(run, prepared.plan, folders, work, monitor)
    exports = export_reports(folders, loaded)
    report = CompressionReport(
        rocket_version=__version__,
        fingerprint=prepared.identity.fingerprint,
        model=prepared.identity.model,
        model_class=run.architecture.class_name,
        revision=prepared.identity.revision,
        settings=without_paths(run.config),
        calibration=calibration_report(run, prepared.calibration, work),
        stages=monitor.costs.stages,
        allocation=allocation_report(found.allocation),
        totals=totals_report(run, layers, exports),
        coverage=coverage_of_run(run),
        exports=exports,
        tensors=account_for_tensors(run, work, run.config.evaluated_export, by_name),
        layers=layers,
        tables=tuple(layer.name for layer in found.decided[found.profiled :]),
        skipped=run.skipped | found.skipped,
        refinement=block_reports(run, refined),
        healing=healing,
        evaluation=evaluation,
        rounds=finished_rounds(work),
        verdict=verdict(run.config, evaluation, found.allocation, exports),
        speed=speed,
    )
    publish(run.source.folder, prepared.output, work, report, folders)
    return report
