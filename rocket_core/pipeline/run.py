"""`compress`: the stages in order."""

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from rocket_core import __version__, budget
from rocket_core.allocation import Allocation, chosen, layer_frontiers
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.config import HUB_TASKS, WORK_FOLDER_NAME, CompressionConfig, ExportKind
from rocket_core.datasets import local_path_of
from rocket_core.devices import map_large_tensors, resolve_device
from rocket_core.errors import (
    CalibrationError,
    CheckpointError,
    IllConditionedGramError,
    InfeasibleBudgetError,
    InsufficientDiskError,
    InsufficientMemoryError,
    InvalidConfigError,
)
from rocket_core.hub import HubAccess, offline
from rocket_core.inputs import CalibrationInputs
from rocket_core.model_profile import ModelProfile
from rocket_core.pipeline.card import model_card
from rocket_core.pipeline.compression import compress_layers, units_of
from rocket_core.pipeline.evaluating import EvaluationPlan, evaluate_export, plan_evaluation
from rocket_core.pipeline.export import stored_bytes, write_export
from rocket_core.pipeline.fetch import obtain_model
from rocket_core.pipeline.files import write_text
from rocket_core.pipeline.kept_profiles import KeptProfiles, ProfileOfRun, profile_identity
from rocket_core.pipeline.preflight import Run, calibration_inputs, prepare_run, run_identity
from rocket_core.pipeline.progress import Callbacks, Monitor, Progress
from rocket_core.pipeline.resources import require_evaluation
from rocket_core.pipeline.sensitivity import measure_sensitivities
from rocket_core.pipeline.sequential import SequentialCompression
from rocket_core.pipeline.stages import Profiled, allocate_layers, objective_of, profile_layers
from rocket_core.pipeline.work_folder import RunIdentity, WorkFolder
from rocket_core.report import (
    AllocationReport,
    CalibrationReport,
    CompressionReport,
    ExportReport,
    LayerReport,
    TotalsReport,
    layer_report,
)

REPORT_NAME = "report.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """What a run reads beside the model: calibration inputs, kept profiles, and what it is evaluated on if it is."""

    calibration: CalibrationInputs
    plan: EvaluationPlan | None
    kept: ProfileOfRun


def compress(
    model: str,
    output: Path,
    config: CompressionConfig,
    *,
    revision: str | None = None,
    resume: bool = False,
    hub: HubAccess = HubAccess(),
    profiles: KeptProfiles | None = None,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_profile: Callable[[int, LayerProfile], None] = lambda _position, _profile: None,
    on_profiled: Callable[[ModelProfile], None] = lambda _profile: None,
    on_allocation: Callable[[Sequence[tuple[str, Candidate]]], None] = lambda _chosen: None,
    should_cancel: Callable[[], bool] = lambda: False,
) -> CompressionReport:
    """Compresses a model and writes the artifacts, each into a folder of its own under `output`.

    Memory is that of one block of the model; see `rocket_core.pipeline.resources`. Finished layers are kept in
    `output/.rocket-work` until the artifacts are complete.

    Args:
        model: folder of a checkpoint, or repository id on the Hub.
        output: folder to write to; created if need be.
        config: all settings.
        revision: branch, tag or commit of a repository.
        resume: go on with what an earlier run with the same choices left in `output`; the result is the same to the
            byte (on the CPU, at an equal number of threads). If that run had finished, its report is returned.
        hub: as whom the Hub is asked, and where downloads are kept.
        profiles: where the profile of an earlier run is taken from, if that had the same model, calibration and
            settings of profiling, and where this run's is kept. It changes no byte of the result. None keeps none.
        on_progress: told of every step, at least once per layer; again and again while a model is downloaded and while
            calibration text passes through a block.
        on_profile: given each layer's place in the model and its profile as soon as that is on disk; a resumed run
            gives those of the earlier one again.
        on_profiled: given all of them together once the last one is there.
        on_allocation: given every layer's name with the candidate that the knapsack chose, in the order of the model.
        should_cancel: asked at every step; True ends the run with what is finished kept.

    Returns:
        The report, which also lies in `output` and beside each artifact.

    Raises:
        RocketError: see `rocket_core.errors` for the kinds.
    """
    device = resolve_device(config.device)
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"{output} is a file; give a folder to write to")
    map_large_tensors()
    work = WorkFolder(output / WORK_FOLDER_NAME)
    callbacks = Callbacks(
        on_progress=on_progress,
        on_profile=on_profile,
        on_profiled=on_profiled,
        on_allocation=on_allocation,
        should_cancel=should_cancel,
    )
    monitor = Monitor(callbacks, device, work.stages(), evaluates=config.evaluate is not None)
    with _resource_errors(output), _tidying(work, monitor):
        source = obtain_model(model, revision, hub, config.ratio, monitor)
        with monitor.stage("preflight"):
            with offline():
                run = prepare_run(source, config)
            identity = run_identity(run)
            finished = _finished_report(output, identity, resume=resume)
            if finished is not None:
                _refuse_another_evaluation(finished, config, output)
                return finished
            work.check(identity, resume=resume)
            _refuse_occupied(output, work, config)
            kept = ProfileOfRun(profiles, profile_identity(identity, run.method))
            inputs = kept.inputs(work) or calibration_inputs(run, work, token=hub.token)
            plan = plan_evaluation(run, token=hub.token)
            kept.require_resources(run, len(inputs), output, held=work.stored_bytes)
            require_evaluation(run, plan, output)
            work.claim(identity, inputs)
            kept.lend(work, inputs)
        with offline():
            given = _Inputs(calibration=inputs, plan=plan, kept=kept)
            report = _compress(run, output, work, identity, given, monitor)
        monitor.finish()
        return report


@contextmanager
def _tidying(work: WorkFolder, monitor: Monitor) -> Iterator[None]:
    """Keeps a run's costs and lets go of its work folder; without finished layers only a wish to stop keeps that."""
    try:
        yield
    except (CalibrationError, CheckpointError, IllConditionedGramError, InfeasibleBudgetError):
        if work.is_ours:
            work.remove_if_idle()
        raise
    finally:
        if work.is_ours and work.is_claimed:
            work.save_stages(monitor.stages)
        work.release()


def _compress(
    run: Run,
    output: Path,
    work: WorkFolder,
    identity: RunIdentity,
    inputs: _Inputs,
    monitor: Monitor,
) -> CompressionReport:
    calibration = inputs.calibration
    profiled = _profile(run, calibration, work, monitor)
    with monitor.stage("allocating"):
        inputs.kept.keep(work)
        monitor.profiled_all(_model_profile(run, inputs.kept.identity, profiled.profiles))
        allocation = allocate_layers(run, profiled.profiles, work)
        selected = chosen(profiled.profiles, allocation, itemsize=run.dtype.itemsize)
        monitor.allocated(selected)
    with monitor.stage("factorizing"):
        units = units_of(selected)
        if run.config.sequential:
            SequentialCompression(run, calibration, work, units, monitor).complete()
        else:
            compress_layers(run, calibration, work, units, monitor)
    frontiers = layer_frontiers(profiled.profiles, allocation.objective, allocation.measure)
    layers = tuple(
        layer_report(profile, candidate, work.outcome(profile.name), frontiers[profile.name])
        for profile, candidate in selected
    )
    with monitor.stage("exporting"):
        by_name = {layer.name: layer for layer in layers}
        folders = {kind: write_export(run, work, kind, by_name, monitor) for kind in run.config.export}
    evaluation = None
    if inputs.plan is not None:
        with monitor.stage("evaluating"):
            evaluation = evaluate_export(run, inputs.plan, folders, work, monitor)
    exports = tuple(
        ExportReport(kind=kind, folder=kind, stored_bytes=stored_bytes(folder)) for kind, folder in folders.items()
    )
    report = CompressionReport(
        rocket_version=__version__,
        fingerprint=identity.fingerprint,
        model=identity.model,
        model_class=run.architecture.class_name,
        revision=identity.revision,
        settings=_without_paths(run.config),
        calibration=_calibration_report(run, calibration),
        stages=monitor.stages,
        allocation=_allocation_report(allocation),
        totals=_totals(run, layers, exports),
        exports=exports,
        layers=layers,
        skipped=run.skipped | profiled.skipped,
        evaluation=evaluation,
    )
    _publish(run, output, work, report, folders)
    return report


def _model_profile(run: Run, identity: RunIdentity, profiles: tuple[LayerProfile, ...]) -> ModelProfile:
    return ModelProfile(
        fingerprint=identity.fingerprint,
        model=identity.model,
        revision=identity.revision,
        settings=identity.settings,
        objective=objective_of(run.config),
        measure=run.config.budget,
        cap_slack=run.config.cap_slack,
        itemsize=run.dtype.itemsize,
        model_parameters=run.architecture.parameters,
        dense_bytes=run.checkpoint.stored_bytes,
        layers=profiles,
    )


def _profile(run: Run, inputs: CalibrationInputs, work: WorkFolder, monitor: Monitor) -> Profiled:
    if run.config.measures_sensitivities:
        with monitor.stage("differentiating"):
            windows = run.config.sensitivity_samples
            # Evenly spaced: the first windows may all be of one document.
            stride = max(1, len(inputs) // windows)
            measure_sensitivities(run, inputs[::stride], work, monitor, windows=windows)
    with monitor.stage("calibrating"):
        return profile_layers(run, inputs, work, monitor)


def _publish(
    run: Run, output: Path, work: WorkFolder, report: CompressionReport, folders: dict[ExportKind, Path]
) -> None:
    """Moves the complete artifacts to their place; the report in `output` says that all are there."""
    text = report.model_dump_json(indent=1) + "\n"
    for export in report.exports:
        folder = folders[export.kind]
        write_text(folder / "README.md", model_card(report, export.kind, run.source.folder))
        write_text(folder / REPORT_NAME, text)
    _refuse_occupied(output, work, run.config)
    work.begin_publishing()
    for export in report.exports:
        # What a run killed between these moves has left: its own artifact, made again since.
        shutil.rmtree(output / export.folder, ignore_errors=True)
        folders[export.kind].replace(output / export.folder)
    write_text(output / REPORT_NAME, text)
    work.remove()


def _finished_report(output: Path, identity: RunIdentity, *, resume: bool) -> CompressionReport | None:
    """The report of a run that had finished; raises where that was another run."""
    file = output / REPORT_NAME
    if not file.is_file():
        return None
    try:
        finished = CompressionReport.model_validate_json(file.read_bytes())
    except ValidationError:
        finished = None
    if resume and finished is not None and finished.fingerprint == identity.fingerprint:
        # A run killed behind its last move may have left this.
        shutil.rmtree(output / WORK_FOLDER_NAME, ignore_errors=True)
        return finished
    raise InvalidConfigError(
        f"{output} already holds the result of another compression; choose another output folder, or remove what is "
        "there"
    )


def _refuse_another_evaluation(finished: CompressionReport, config: CompressionConfig, output: Path) -> None:
    wanted = _without_paths(config).evaluate
    if wanted is not None and wanted != finished.settings.evaluate:
        raise InvalidConfigError(
            f"the compression in {output} is finished and its evaluation was another one, or none; measure the "
            "artifact with `rocket evaluate`, or leave evaluate out"
        )


def _refuse_occupied(output: Path, work: WorkFolder, config: CompressionConfig) -> None:
    """Refuses to write over folders that are not this run's own."""
    occupied = [kind for kind in config.export if (output / kind).exists()]
    if occupied and not work.is_publishing:
        raise InvalidConfigError(
            f"{output} already holds {occupied[0]}, which this run has not made; choose another output folder, or "
            "remove what is there"
        )


def _calibration_report(run: Run, inputs: CalibrationInputs) -> CalibrationReport:
    calibration = _without_paths(run.config).calibration
    return CalibrationReport(
        kind=run.architecture.kind,
        dataset=calibration.dataset,
        samples=len(inputs),
        sequence_length=run.sequence_length,
        seed=calibration.seed,
        tokens=len(inputs) * run.positions,
        token_sha256=inputs.sha256(),
    )


def _without_paths(config: CompressionConfig) -> CompressionConfig:
    """The settings without folders of this machine: reports travel with the model."""
    calibration = config.calibration.model_copy(update={"dataset": _without_folder(config.calibration.dataset)})
    evaluate = config.evaluate
    if evaluate is not None:
        tasks = tuple(name if name in HUB_TASKS else Path(name).name for name in evaluate.tasks)
        evaluate = evaluate.model_copy(update={"dataset": _without_folder(evaluate.dataset), "tasks": tasks})
    return config.model_copy(update={"calibration": calibration, "evaluate": evaluate})


def _without_folder(dataset: str) -> str:
    path = local_path_of(dataset)
    return dataset if path is None else path.name


def _allocation_report(allocation: Allocation) -> AllocationReport:
    return AllocationReport.model_validate({name: getattr(allocation, name) for name in AllocationReport.model_fields})


def _totals(run: Run, layers: Sequence[LayerReport], exports: tuple[ExportReport, ...]) -> TotalsReport:
    compressible = sum(layer.d_in * layer.d_out for layer in layers)
    kept = sum(layer.kept_parameters for layer in layers)
    whole = run.architecture.parameters
    return TotalsReport(
        compressible_parameters=compressible,
        kept_parameters=kept,
        achieved_ratio=budget.achieved_ratio(compressible, kept),
        achieved_byte_ratio=budget.achieved_ratio(
            sum(run.stored_bytes(layer.name) for layer in layers), sum(layer.stored_bytes for layer in layers)
        ),
        model_parameters=whole,
        model_compression_ratio=budget.achieved_ratio(whole, whole - compressible + kept),
        stored_bytes=min(export.stored_bytes for export in exports),
        dense_bytes=run.checkpoint.stored_bytes,
    )


@contextmanager
def _resource_errors(output: Path) -> Iterator[None]:
    """Says what ran out, where torch and the system only say that something did."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InsufficientMemoryError(
            f"memory ran out: {str(error).strip().splitlines()[0] if str(error) else 'no more to be had'}; finished "
            "layers are kept; resume with more memory free, or start again with fewer samples"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InsufficientDiskError(
            f"the disk of {output} is full; finished layers are kept: free some space and resume"
        ) from error
