"""One attempt at one job, in its own process: `python -m worker.attempt.job JOB FENCE PARENT`.

It has the lease, the database, the store and the secrets. Untrusted models are read by processes that it starts (see
`worker.confined.compute`), and it does not trust their messages or files. It does not load torch.

The outcome of the attempt is written to the job's row; if the process ends without doing so, its supervisor does.
"""

import argparse
import functools
import logging
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import AppError, FencedOutError
from app.shared.lifecycle import Status
from app.shared.logging import configure_logging, log_uncaught_errors
from app.shared.models import Job
from app.shared.outcomes import NewEvent
from app.shared.repositories import leases, outputs, works
from app.shared.repositories.leases import Lease
from app.shared.requests import LOCAL, UPLOAD, JobRequest, PushTarget
from app.shared.settings import Settings, load_settings
from app.shared.storage import WorkFolders, open_store
from rocket_core.errors import (
    CompressionCancelledError,
    InvalidConfigError,
    UnknownDatasetError,
    UnmatchedIgnoreError,
    UploadTokenError,
    WorkFolderError,
)
from worker.attempt.artifacts import REPORT_NAME, StoredResult, read_report
from worker.attempt.delegation import Delegation, fetching
from worker.attempt.earlier_artifact import fetch_earlier_artifact
from worker.attempt.folders import JobFolders
from worker.attempt.helper import Helper
from worker.attempt.inputs import Inputs, collect_inputs
from worker.attempt.lease import LeaseKeeper
from worker.attempt.publisher import ArtifactPublisher
from worker.attempt.writer import ProgressWriter
from worker.confined.messages import LogLevel, UploadRequest
from worker.failures import ReportedError, failure_of
from worker.processes.bubblewrap import start_in_bubblewrap
from worker.processes.children import Launcher, start_program
from worker.processes.isolation import Isolation
from worker.processes.limits import ProcessLimits, group_name
from worker.processes.linux import EXIT_FENCED_OUT, adopt_orphans, die_with, hide_memory, set_on_sigterm

_EXIT_UNSAID = 75
# Errors about the files of an earlier run, unfinished or complete.
_STALE = WorkFolderError.code
_CONTRADICTS = frozenset({InvalidConfigError.code, UnknownDatasetError.code, UnmatchedIgnoreError.code})
_log = logging.getLogger(__name__)


class Attempt:
    """One attempt at a job, from the claim to its outcome.

    Args:
        settings: settings of the service.
        database: the database.
        lease: lease on the job.
        stop: set when the job must stop at the next step.
        device: device to compute on, as the library names it.
        isolation: how those processes are confined.
        launch: starts the processes that read the model.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        lease: Lease,
        stop: threading.Event,
        device: str = "auto",
        *,
        isolation: Isolation,
        launch: Launcher = start_program,
    ) -> None:
        self._settings = settings
        self._isolation = isolation
        self._device = device
        self._database = database
        self._lease = lease
        self._stop = stop
        self._launch = launch
        self._writer = ProgressWriter(
            database, lease, patience=settings.lease_seconds, max_profiles=settings.max_profiles
        )
        self._store = open_store(settings)
        self._work = WorkFolders(settings.data_dir / "work")
        self._publisher = ArtifactPublisher(
            self._store,
            self._work,
            database,
            self._writer,
            retention=timedelta(days=settings.artifact_retention_days),
        )
        self._finished: StoredResult | None = None

    def run(self, parent: int) -> None:
        """Work on the job and write the outcome of the attempt.

        Args:
            parent: process id of the supervisor.

        Raises:
            FencedOutError: the job was taken from this worker.
        """
        job = self._writer.write(leases.lock_leased_job)
        request = JobRequest.model_validate(job.request)
        assert job.work_key is not None
        folders = JobFolders(root=self._work.path(job.work_key))
        hidden = self._hidden_folders(folders)
        try:
            keeper = LeaseKeeper(self._database, self._lease, self._settings, parent=parent, on_stop=self._stop.set)
            with keeper:
                failure = failure_of(
                    lambda: self._work_on(job, request, folders), location=self._writer.location, hidden=hidden
                )
            if failure is None:
                key = job.work_key
                failure = failure_of(lambda: self._succeed(key), location=self._writer.location, hidden=hidden)
        except CompressionCancelledError:
            status = self._writer.write(leases.release_job)
            self._forget_download(folders, status)
            _log.info("released the job, which is now %s", status)
            return
        if failure is not None:
            backoff = self._settings.retry_backoff_seconds
            status = self._writer.write(leases.fail_job, failure, backoff_seconds=backoff)
            self._forget_download(folders, status)

    def _forget_download(self, folders: JobFolders, status: Status) -> None:
        # A retry has no token with which to use the download, and fetches an uploaded model again.
        if status.is_terminal:
            shutil.rmtree(folders.hub, ignore_errors=True)
            shutil.rmtree(folders.uploaded, ignore_errors=True)

    def _work_on(self, job: Job, request: JobRequest, folders: JobFolders) -> None:
        inputs = collect_inputs(
            self._settings,
            self._database,
            self._store,
            job,
            request,
            folders=folders,
            device=self._device,
            before_each=self._before_transfer,
        )
        if not folders.output.exists():
            self._discard_inherited_layers()
        artifact = self._earlier_artifact(job, request, folders)
        delegation = Delegation(
            self._lease.job_id,
            folders,
            self._writer,
            self._stop,
            launch=self._launch,
            isolation=self._isolation,
            limits=self._limits,
        )
        if request.push is not None:
            assert artifact is not None
            upload = _upload_request(job, request.push, inputs, artifact, self._settings.log_level)
            self._writer.write(works.save_report, delegation.push(upload))
            return
        downloaded = None
        if inputs.is_on_hub:
            fetch = inputs.fetch_request(self._settings.log_level, measure_energy=self._settings.measure_energy)
            downloaded = delegation.download(fetch)
            inputs.hold_download(downloaded)
        token = inputs.hub.token if inputs.needs_network else None
        more = {"artifact": artifact, "export_to": request.export_to, "token": token}
        asked = inputs.compute_request(request.kind, self._settings, folders.output, downloaded).model_copy(update=more)
        readable = inputs.readable if artifact is None else (*inputs.readable, artifact)
        compute = functools.partial(delegation.compute, asked, readable=readable, network=inputs.needs_network)
        try:
            compute()
        except ReportedError as error:
            # The model or the library may have changed before a job is retried. Between attempts at one job they must
            # not: its rows are already visible.
            if job.retry_of is None or job.attempt > 1 or not _is_stale(error.error.code, folders.output):
                raise
            self._start_afresh(folders.output, error.error.message)
            compute()
        if request.makes_result:
            report = read_report(folders.output)
            self._finished = self._publisher.store(report, folders.output, before_each=self._before_transfer)

    def _earlier_artifact(self, job: Job, request: JobRequest, folders: JobFolders) -> Path | None:
        """Return the artifact of the job that this one works on, once it is on this machine; None without one."""
        if request.source_job_id is None:
            return None

        def before_each(share: float) -> None:
            if self._stop.is_set():
                raise CompressionCancelledError("cancelled while fetching the artifact")
            self._writer.on_progress(fetching(share))

        return fetch_earlier_artifact(
            self._database, self._store, job, request.source_export, folders.earlier, before_each=before_each
        )

    def _limits(self, writable: Sequence[Path], user: int | None) -> ProcessLimits:
        return ProcessLimits(
            group_name(self._lease.fence),
            writable,
            cap=self._settings.max_job_memory_bytes,
            accelerated=self._device != "cpu",
            user=user,
        )

    def _discard_inherited_layers(self) -> None:
        """Discard the layers that a retry copied if their checkpoints are on another machine."""
        message = "the checkpoints of the job that this one repeats are not on this worker; it starts afresh"
        event = NewEvent(type="message", level="warning", message=message)
        self._writer.write(outputs.discard_inherited_layers, event)

    def _start_afresh(self, output: Path, reason: str) -> None:
        _log.warning("the checkpoints cannot be used: %s", reason)
        message = "the checkpoints of the job that this one repeats cannot be used any more; it starts afresh"
        event = NewEvent(type="message", level="warning", message=message)
        self._writer.write(outputs.discard_layers, event)
        # Keep the folder that contains it, which holds the working directory of this process.
        shutil.rmtree(output, ignore_errors=True)

    def _before_transfer(self) -> None:
        if self._stop.is_set():
            raise CompressionCancelledError("cancelled while files were copied from or to the store")
        self._writer.on_stored_file()

    def _succeed(self, work_key: str) -> None:
        if self._finished is not None:
            self._publisher.publish(self._finished, work_key)
            return
        status = self._writer.write(outputs.succeed_without_files)
        self._work.remove(work_key)
        _log.info("the job has %s", status)

    def _hidden_folders(self, folders: JobFolders) -> dict[str, str]:
        names = {
            self._settings.models_folder: LOCAL.removesuffix("/"),
            self._settings.datasets_folder: LOCAL.removesuffix("/"),
            folders.uploaded: UPLOAD.removesuffix("/"),
            folders.output: f"the work folder of {self._lease.job_id}",
            folders.earlier: "the earlier result",
            self._settings.data_dir: "the data folder",
            _home(): "~",
        }
        # The library resolves links.
        return {str(path): name for folder, name in names.items() for path in (folder, folder.resolve())}


def _upload_request(job: Job, target: PushTarget, inputs: Inputs, artifact: Path, log_level: LogLevel) -> UploadRequest:
    # Never the operator's token: a push that may use that one was stored with it.
    if job.hub_token is None or inputs.hub.token is None:
        raise UploadTokenError("this push has no Hub token; push again with a token that has write access")
    return UploadRequest(
        log_level=log_level,
        folder=artifact,
        repository=target.repository,
        private=target.private,
        message=f"{job.request['model_id']}, {target.export} export, compressed by Rocket",
        token=inputs.hub.token,
    )


def _is_stale(code: str, output: Path) -> bool:
    """Return whether an error is about files of a different compression, unfinished or complete, in the folder."""
    return code == _STALE or (code in _CONTRADICTS and (output / REPORT_NAME).is_file())


def _home() -> Path:
    """Return the home of the worker's user; a path that does not exist if the user has no home."""
    with suppress(RuntimeError):
        home = Path.home()
        if home != Path(home.anchor):
            return home
    return Path("~")


def main(arguments: Sequence[str] | None = None, *, launch: Launcher = start_program) -> int:
    """Run one attempt and return the exit code of the process.

    Args:
        arguments: of the command line; None means those of this process.
        launch: starts the processes that read the model.
    """
    parser = argparse.ArgumentParser(prog="python -m worker.attempt.job", description=__doc__)
    parser.add_argument("job", help="id of the job")
    parser.add_argument("fence", help="proves that the job was claimed for this process")
    parser.add_argument("parent", type=int, help="process id of the supervisor")
    parser.add_argument("--request", help="id of the request that made the job, for the log")
    parser.add_argument("--device", default="auto", help="what computes: auto, cpu, cuda")
    parser.add_argument("--isolation", default="landlock", help="what confines the processes that read the model")
    parser.add_argument("--helper", help="unique name, to help the worker that has the job")
    parser.add_argument("--worker", default="", help="name of the worker that helps")
    parsed = parser.parse_args(arguments)
    die_with(parsed.parent)
    hide_memory()
    adopt_orphans()
    settings = load_settings()
    # Set for every line, including those of threads, which do not inherit a context.
    named = {"job_id": parsed.job, "request_id": parsed.request}
    configure_logging(settings, **{name: value for name, value in named.items() if value is not None})
    log_uncaught_errors()
    stop = threading.Event()
    set_on_sigterm(stop)
    database = Database(settings.database)
    try:
        lease = Lease(job_id=parsed.job, fence=parsed.fence)
        isolation = Isolation(mechanism=parsed.isolation, is_required=settings.requires_isolation)
        if isolation.mechanism == "bubblewrap":
            launch = start_in_bubblewrap
        shared = (settings, database, lease, stop, parsed.device)
        if parsed.helper is not None:
            names = {"name": parsed.helper, "worker": parsed.worker}
            Helper(*shared, **names, isolation=isolation, launch=launch).run()
            return 0
        Attempt(*shared, isolation=isolation, launch=launch).run(parsed.parent)
    except FencedOutError as error:
        _log.warning("%s", error)
        return EXIT_FENCED_OUT
    except AppError as error:
        _log.error("cannot record how the attempt ended, so its supervisor will try: %s", error)
        return _EXIT_UNSAID
    finally:
        database.close()
        # The outcome is written; a signal to stop would only turn a success into a failure.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
