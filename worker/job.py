"""`python -m worker.job JOB FENCE PARENT`: one attempt at one job, in a process of its own.

A process, because memory errors, crashes of native code and leaks must not reach the worker, and because a job must be
killable. How the attempt ended stands in the job's row; if the process ends without that, its supervisor writes it.
"""

import argparse
import logging
import mimetypes
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from app.shared.database import Database
from app.shared.errors import AppError, DiskFullError, FencedOutError, StorageError
from app.shared.lifecycle import Status
from app.shared.logging import adopt_loggers, configure_logging, log_uncaught_errors
from app.shared.models import Job
from app.shared.outcomes import JobResult, NewArtifact, NewEvent
from app.shared.repositories import leases, outputs, sweeps
from app.shared.repositories.leases import Lease
from app.shared.requests import LOCAL, JobRequest
from app.shared.settings import Settings, load_settings
from app.shared.storage import WorkFolders, open_store
from rocket_core.energy import EnergyMeter
from rocket_core.errors import (
    CompressionCancelledError,
    InvalidConfigError,
    WorkFolderBusyError,
    WorkFolderError,
)
from rocket_core.garbage import no_collection
from rocket_core.report import CompressionReport
from worker.failures import failure_of
from worker.inputs import HUB_CACHE, Inputs, collect_inputs
from worker.lease import EXIT_FENCED_OUT, LeaseKeeper, die_with
from worker.progress import ProgressWriter

if TYPE_CHECKING:
    from rocket_core.pipeline import KeptProfiles

_MEDIA_TYPES = {".safetensors": "application/vnd.safetensors", ".md": "text/markdown", ".jinja": "text/plain"}
_REPORTS = ("report.json", "report.html")
_PROFILES = "profiles"
_EXIT_UNSAID = 75
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A compression that is complete, with its files stored but not yet published.

    Attributes:
        report: the report.
        artifacts: the files.
    """

    report: CompressionReport
    artifacts: tuple[NewArtifact, ...]


class Attempt:
    """One attempt at a job, from the claim to the row's last word.

    Args:
        settings: of the service.
        database: the rows.
        lease: the right to work on the job.
        stop: set when the job shall stop at the next step.
        device: what computes, as the library names it.
    """

    def __init__(
        self, settings: Settings, database: Database, lease: Lease, stop: threading.Event, device: str = "auto"
    ) -> None:
        self._settings = settings
        self._device = device
        self._database = database
        self._lease = lease
        self._stop = stop
        self._writer = ProgressWriter(
            database, lease, patience=settings.lease_seconds, max_profiles=settings.max_profiles
        )
        self._store = open_store(settings)
        self._work = WorkFolders(settings.data_dir / "work")
        # Loads beside torch.
        self._meter = EnergyMeter() if settings.measure_energy else None
        self._finished: Finished | None = None

    def run(self, parent: int) -> None:
        """Works on the job and writes how the attempt ended.

        Args:
            parent: process id of the supervisor.

        Raises:
            FencedOutError: the job was taken away.
        """
        job = self._writer.insist(lambda session: leases.hold(session, self._lease))
        request = JobRequest.model_validate(job.request)
        assert job.work_key is not None
        folder = self._work.path(job.work_key)
        hidden = self._hidden_folders(folder)
        try:
            keeper = LeaseKeeper(self._database, self._lease, self._settings, parent=parent, on_stop=self._stop.set)
            with keeper, self._meter or nullcontext():
                failure = failure_of(
                    lambda: self._work_on(job, request, folder / "out"), place=self._writer.place, hidden=hidden
                )
            if failure is None:
                key = job.work_key
                failure = failure_of(lambda: self._succeed(key), place=self._writer.place, hidden=hidden)
        except CompressionCancelledError:
            status = self._writer.insist(lambda session: leases.release_job(session, self._lease))
            self._forget_download(folder, status)
            _log.info("let go of the job, which is now %s", status)
            return
        if failure is not None:
            backoff = self._settings.retry_backoff_seconds
            status = self._writer.insist(
                lambda session: leases.fail_job(session, self._lease, failure, backoff_seconds=backoff)
            )
            self._forget_download(folder, status)

    def _forget_download(self, folder: Path, status: Status) -> None:
        # A retry has no token to use it with.
        if status.is_terminal:
            shutil.rmtree(folder / HUB_CACHE, ignore_errors=True)

    def _work_on(self, job: Job, request: JobRequest, output: Path) -> None:
        # Takes seconds, in which the lease must be kept already.
        from huggingface_hub.utils import disable_progress_bars

        # Those of transformers too, which asks at its import; this process writes a log.
        disable_progress_bars()
        with no_collection(lasting=True):
            from rocket_core.pipeline import KeptProfiles

        adopt_loggers()
        given = collect_inputs(
            self._settings, self._database, self._store, job, request, folder=output.parent, device=self._device
        )
        # Of all tenants: whoever comes to one has the model, and the very text.
        profiles = KeptProfiles(self._settings.data_dir / _PROFILES, quota_bytes=self._settings.kept_profiles_bytes)
        run = self._compress if request.kind == "compression" else self._profile
        if not output.exists():
            self._discard_inherited_layers()
        try:
            run(given, output, profiles)
        except (WorkFolderError, InvalidConfigError) as error:
            # A retry may come after the model or the library has changed. An attempt must not: its rows are out.
            if job.retry_of is None or job.attempt > 1 or not _is_stale(error, output):
                raise
            self._start_afresh(output, str(error))
            run(given, output, profiles)

    def _compress(self, given: Inputs, output: Path, profiles: "KeptProfiles") -> None:
        from rocket_core.pipeline import compress

        report = compress(
            given.model,
            output,
            given.config,
            revision=given.revision,
            resume=True,
            hub=given.hub,
            profiles=profiles,
            meter=self._meter,
            on_progress=self._writer.on_progress,
            on_profile=self._writer.on_profile,
            on_profiled=self._writer.on_profiled,
            on_allocation=self._writer.on_allocation,
            should_cancel=self._stop.is_set,
        )
        self._finished = Finished(report=report, artifacts=self._stored(report, output))

    def _profile(self, given: Inputs, output: Path, profiles: "KeptProfiles") -> None:
        from rocket_core.pipeline import profile_model

        profile = profile_model(
            given.model,
            output,
            given.config,
            revision=given.revision,
            resume=True,
            hub=given.hub,
            profiles=profiles,
            meter=self._meter,
            on_progress=self._writer.on_progress,
            on_profile=self._writer.on_profile,
            on_costs=self._writer.on_costs,
            should_cancel=self._stop.is_set,
        )
        self._writer.on_profiled(profile)

    def _discard_inherited_layers(self) -> None:
        """Takes back what a retry has copied, where the checkpoints that it stands for are on another machine."""
        message = "the checkpoints of the job that this one repeats are not on this worker; it starts afresh"
        event = NewEvent(type="message", level="warning", message=message)
        self._writer.insist(lambda session: outputs.discard_inherited_layers(session, self._lease, event))

    def _start_afresh(self, output: Path, reason: str) -> None:
        _log.warning("the checkpoints cannot be used: %s", reason)
        message = "the checkpoints of the job that this one repeats cannot be used any more; it starts afresh"
        event = NewEvent(type="message", level="warning", message=message)
        self._writer.insist(lambda session: outputs.discard_layers(session, self._lease, event))
        # Not the folder around it, which holds the working directory of this process.
        shutil.rmtree(output, ignore_errors=True)

    def _stored(self, report: CompressionReport, output: Path) -> tuple[NewArtifact, ...]:
        folders = [output / export.folder for export in report.exports]
        files = [*(output / name for name in _REPORTS), *(file for folder in folders for file in folder.rglob("*"))]
        artifacts: list[NewArtifact] = []
        try:
            for file in sorted(file for file in files if file.is_file()):
                if self._stop.is_set():
                    raise CompressionCancelledError("cancelled while storing the artifacts")
                self._writer.on_stored_file()
                stored = self._store.put(file)
                artifacts.append(
                    NewArtifact(
                        name=file.relative_to(output).as_posix(),
                        storage_key=stored.key,
                        size=stored.size,
                        sha256=stored.sha256,
                        media_type=_media_type(file),
                    )
                )
        except BaseException:
            self._remove(artifacts)
            raise
        return tuple(artifacts)

    def _succeed(self, work_key: str) -> None:
        if self._finished is not None:
            self._publish(self._finished, work_key)
            return
        status = self._writer.insist(lambda session: outputs.succeed_profile(session, self._lease))
        self._work.remove(work_key)
        _log.info("the job has %s", status)

    def _publish(self, finished: Finished, work_key: str) -> None:
        totals = finished.report.totals
        result = JobResult(**{name: getattr(totals, name) for name in JobResult.model_fields})
        retention = timedelta(days=self._settings.artifact_retention_days)
        try:
            status = self._writer.insist(
                lambda session: outputs.succeed_job(
                    session,
                    self._lease,
                    result=result,
                    report=finished.report,
                    artifacts=finished.artifacts,
                    retention=retention,
                )
            )
        except FencedOutError:
            self._remove_unpublished(finished.artifacts)
            raise
        except DiskFullError:
            # Of a database that did not answer it cannot be told whether it has published them; a sweep finds out.
            self._remove(finished.artifacts)
            raise
        if status == Status.SUCCEEDED:
            self._work.remove(work_key)
        else:
            self._remove(finished.artifacts)
        _log.info("the job has %s", status)

    def _remove_unpublished(self, artifacts: Sequence[NewArtifact]) -> None:
        # A commit whose answer was lost has ended the job, so that trying again is refused: then they are published.
        keys = {artifact.storage_key for artifact in artifacts}
        with self._database.snapshot() as session:
            orphans = sweeps.find_orphans(session, storage_keys=keys, work_keys=())
        self._remove([artifact for artifact in artifacts if artifact.storage_key in orphans])

    def _remove(self, artifacts: Sequence[NewArtifact]) -> None:
        try:
            for artifact in artifacts:
                self._store.remove(artifact.storage_key)
        except StorageError as error:
            # What the attempt has come to matters more.
            _log.warning("artifacts that nobody needs are left to a sweep: %s", error)

    def _hidden_folders(self, folder: Path) -> dict[str, str]:
        names = {
            self._settings.models_folder: LOCAL.removesuffix("/"),
            self._settings.datasets_folder: LOCAL.removesuffix("/"),
            folder / "out": f"the work folder of {self._lease.job_id}",
            self._settings.data_dir: "the data folder",
            _home(): "~",
        }
        # The library follows links.
        return {str(path): name for place, name in names.items() for path in (place, place.resolve())}


def _is_stale(error: WorkFolderError | InvalidConfigError, output: Path) -> bool:
    """Whether what a compression found in its folder, unfinished or complete, is that of another."""
    if isinstance(error, InvalidConfigError):
        return (output / _REPORTS[0]).is_file()
    return not isinstance(error, WorkFolderBusyError)


def _home() -> Path:
    """Home of whoever runs the worker; a folder that does not exist if they have none of their own."""
    with suppress(RuntimeError):
        home = Path.home()
        if home != Path(home.anchor):
            return home
    return Path("~")


def _media_type(file: Path) -> str:
    known = _MEDIA_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0]
    return known or "application/octet-stream"


def _set_on_sigterm(stop: threading.Event) -> None:
    # An exception out of a signal handler could split a commit; a flag cannot.
    def ask(_number: int, _frame: FrameType | None) -> None:
        # A second signal would wait for ever for the flag's lock if it came while this one holds it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.set()

    signal.signal(signal.SIGTERM, ask)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one attempt and returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m worker.job", description=__doc__)
    parser.add_argument("job", help="id of the job")
    parser.add_argument("fence", help="proves that the job was claimed for this process")
    parser.add_argument("parent", type=int, help="process id of the supervisor")
    parser.add_argument("--request", help="id of the request that made the job, for the log")
    parser.add_argument("--device", default="auto", help="what computes: auto, cpu, cuda")
    given = parser.parse_args(arguments)
    die_with(given.parent)
    settings = load_settings()
    # Of every line, also those of threads, which have no context of their own.
    named = {"job_id": given.job, "request_id": given.request}
    configure_logging(settings, **{name: value for name, value in named.items() if value is not None})
    log_uncaught_errors()
    stop = threading.Event()
    _set_on_sigterm(stop)
    database = Database(settings.database)
    try:
        lease = Lease(job_id=given.job, fence=given.fence)
        Attempt(settings, database, lease, stop, given.device).run(given.parent)
    except FencedOutError as error:
        _log.warning("%s", error)
        return EXIT_FENCED_OUT
    except AppError as error:
        _log.error("cannot say how the attempt ended, which its supervisor will try to: %s", error)
        return _EXIT_UNSAID
    finally:
        database.close()
        # All is said; a signal to stop now would only make a good end look like a bad one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
