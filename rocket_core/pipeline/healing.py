"""`heal`: training of a finished artifact towards the model that it was made from."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import ModelSource
from rocket_core.config import WORK_FOLDER_NAME, CompressionConfig, HealingConfig, Stage
from rocket_core.engines import ExportKind
from rocket_core.errors import InvalidConfigError
from rocket_core.evaluation import ModelFolder, open_model
from rocket_core.hub.repository import HubAccess, offline
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.pipeline.artifact import Artifact, check_original, open_artifact, original_name
from rocket_core.pipeline.observer import Observer
from rocket_core.pipeline.open_work import open_work
from rocket_core.pipeline.preflight import dataset_identity
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.requirements import check_healing
from rocket_core.pipeline.stage_costs import combined_costs
from rocket_core.pipeline.stages.download import obtain_model
from rocket_core.pipeline.stages.export import export_reports
from rocket_core.pipeline.stages.healing.artifact import heal_artifact
from rocket_core.pipeline.stages.healing.files import check_healed, write_dense, write_healed
from rocket_core.pipeline.stages.healing.plan import HealingPlan, plan_healing
from rocket_core.pipeline.stages.publish import check_output_free, move_into_place, place
from rocket_core.pipeline.state.files import read_model, write_model
from rocket_core.pipeline.state.healing_state import HealingState
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.healing import HealingReport
from rocket_core.report.schema import CompressionReport, StageReport
from rocket_core.schema import FrozenModel
from rocket_core.system.devices import resolve_device
from rocket_core.system.energy import EnergyMeter
from rocket_core.version import __version__

HealedExport = Literal["rocket", "dense"]
"""Exports of a healed artifact."""
RECORD_NAME = "healing.json"
_STAGES: frozenset[Stage] = frozenset({"downloading", "preflight", "healing", "exporting"})


class HealingRecord(FrozenModel):
    """A finished healing; its file in the output folder means that all artifacts are there."""

    fingerprint: str
    """hash of the artifact, the original, all settings and the version."""
    healing: HealingReport
    """the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedHealing:
    """Validated healing with its claimed work folder.

    Attributes:
        artifact: what is healed.
        source: location of the dense model.
        original: the dense model.
        plan: the text and the schedule.
        identity: identity of the work.
        device: device to train on.
        exports: artifacts to write.
        output: the output folder.
        work: the claimed work folder.
    """

    artifact: Artifact
    source: ModelSource
    original: ModelFolder
    plan: HealingPlan
    identity: RunIdentity
    device: torch.device
    exports: tuple[HealedExport, ...]
    output: Path
    work: WorkFolder


def heal(
    artifact: Path | str,
    output: Path | str,
    config: HealingConfig,
    *,
    model: str | ModelSource | None = None,
    revision: str | None = None,
    exports: tuple[HealedExport, ...] = ("rocket",),
    resume: bool = False,
    hub: HubAccess = HubAccess(),
    meter: EnergyMeter | None = None,
    download: StageReport | None = None,
    observer: Observer | None = None,
) -> HealingReport:
    """Train what an artifact stores as numbers, so that it predicts tokens as the model that it was made from.

    Minimises the KL divergence of next-token distributions from the dense model's over coefficients, dictionaries,
    scales stored as float16, norms and biases, with AdamW. Supports, codes, and the size of the artifact do not change.
    Takes memory for both models as a whole.

    Args:
        artifact: folder of a `rocket` artifact, or output folder of a compression that exported one.
        output: output folder; created if needed.
        config: all settings.
        model: folder of the original, its repository, or the original as found with `find_model`; None takes the
            repository that the artifact's report names.
        revision: branch, tag or commit of a repository.
        exports: artifacts to write, each into its own folder under `output`; others can be made later from `rocket`.
        resume: continue what an earlier run with the same choices left in `output`; the result is identical to the byte
            (on the CPU, with the same number of threads). If that run had finished, its report is returned.
        hub: credentials and cache directory for Hub access.
        meter: measures the energy of each stage, starting before the call; None leaves it out of the report.
        download: cost of downloading the original, if it was found before the call; its device is filled in.
        observer: notified of the progress; see `Observer`. None shows a bar if a person looks on.

    Returns:
        The report, which is also written to `output`; and into the report of the compression, if the artifact has one.

    Raises:
        RocketError: see `rocket_core.errors` for the kinds.
    """
    artifact, output = Path(artifact), Path(output)
    monitor_of = partial(Monitor, stages=_STAGES)
    with open_work(output, config.device, observer, monitor_of, meter=meter, download=download) as (work, monitor):
        with monitor.stage("preflight"), offline():
            found = open_artifact(artifact)
        source = _find_original(found, model, revision, hub, monitor)
        with monitor.stage("preflight"):
            check_original(found.report, source)
            identity = _identity(found, source, config, exports)
            finished = _finished(output, identity, resume=resume)
            if finished is not None:
                return finished
            work.check(identity, resume=resume)
            check_output_free(output, work, exports)
            prepared = _PreparedHealing(
                artifact=found,
                source=source,
                original=open_model(source.folder),
                plan=_plan(source, config, work, hub.token),
                identity=identity,
                device=resolve_device(config.device),
                exports=exports,
                output=output,
                work=work,
            )
            monitor.observer.on_requirements(check_healing(prepared.plan, source.name, prepared.device, output))
            work.claim(identity, CalibrationInputs.of_text(prepared.plan.windows))
        with offline():
            monitor.observer.on_offline()
            report = _heal(prepared, monitor)
        monitor.finish()
        return report


def _find_original(
    artifact: Artifact, model: str | ModelSource | None, revision: str | None, hub: HubAccess, monitor: Monitor
) -> ModelSource:
    if isinstance(model, ModelSource):
        return model
    return obtain_model(*original_name(artifact, model, revision), hub, CompressionConfig(), monitor)


def _identity(
    artifact: Artifact, original: ModelSource, config: HealingConfig, exports: tuple[HealedExport, ...]
) -> RunIdentity:
    settings = config.model_dump(mode="json") | {"exports": list(exports), "original": original.name}
    settings["device"] = resolve_device(config.device).type
    settings["dataset"] = dataset_identity(config.dataset)
    return RunIdentity(
        rocket_version=__version__,
        model=artifact.source.name,
        revision=artifact.source.revision(artifact.checkpoint),
        settings=settings,
    )


def _finished(output: Path, identity: RunIdentity, *, resume: bool) -> HealingReport | None:
    """Return the report if this healing has finished; raise an error if the result belongs to another run."""
    file = output / RECORD_NAME
    if not file.is_file():
        return None
    record = read_model(file, HealingRecord)
    if resume and record.fingerprint == identity.fingerprint:
        # A run killed after its last move may have left this.
        shutil.rmtree(output / WORK_FOLDER_NAME, ignore_errors=True)
        return record.healing
    raise InvalidConfigError(
        f"{output} already holds the result of another healing; choose another output folder, or remove what is there"
    )


def _plan(source: ModelSource, config: HealingConfig, work: WorkFolder, token: str | None) -> HealingPlan:
    drawn = work.inputs()
    architecture = build_architecture(read_config(source.folder), torch.float32)
    windows = None if drawn is None else drawn.tensors["input_ids"]
    return plan_healing(open_model(source.folder), architecture, config, windows=windows, token=token)


def _heal(prepared: _PreparedHealing, monitor: Monitor) -> HealingReport:
    work, artifact = prepared.work, prepared.artifact
    with monitor.stage("healing"):
        state = HealingState.within(work.path)
        healed, report = heal_artifact(
            prepared.plan, artifact.model, prepared.original, prepared.device, state, monitor
        )
    with monitor.stage("exporting"):
        rocket = work.new_export("rocket")
        count = len(artifact.checkpoint.entries)
        written = iter(range(count))
        write_healed(
            artifact.model.path, healed, rocket, on_tensor=lambda key: monitor.step(next(written) / count, key)
        )
        check_healed(artifact.model.path, healed, rocket, prepared.plan.windows[:1], prepared.device)
        folders: dict[ExportKind, Path] = {"rocket": rocket}
        if "dense" in prepared.exports:
            folders["dense"] = work.new_export("dense")
            write_dense(open_model(rocket), folders["dense"], max_shard_bytes=CompressionConfig().max_shard_bytes)
    _publish(prepared, report, {kind: folders[kind] for kind in prepared.exports}, monitor.costs.stages)
    return report


def _publish(
    prepared: _PreparedHealing,
    healing: HealingReport,
    folders: Mapping[ExportKind, Path],
    stages: tuple[StageReport, ...],
) -> None:
    before, output, work = prepared.artifact.report, prepared.output, prepared.work
    if before is None:
        move_into_place(output, work, folders)
    else:
        place(prepared.source.folder, output, work, _healed_report(before, healing, folders, stages), folders)
    write_model(output / RECORD_NAME, HealingRecord(fingerprint=prepared.identity.fingerprint, healing=healing))
    work.remove()


def _healed_report(
    before: CompressionReport,
    healing: HealingReport,
    folders: Mapping[ExportKind, Path],
    stages: tuple[StageReport, ...],
) -> CompressionReport:
    """Return the report of the compression with what healing changed; what was measured before it is left out."""
    added = [stage for stage in stages if stage.name in ("healing", "exporting")]
    return before.model_copy(
        update={
            "exports": export_reports(folders),
            "stages": combined_costs(before.stages, added),
            "healing": healing,
            "evaluation": None,
            "verdict": None,
            "speed": None,
        }
    )
