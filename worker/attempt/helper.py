"""Helping with a job that another worker runs: blocks of its model, in processes confined as those of an attempt.

The attempt does not depend on it; see `rocket_core.pipeline.devices.offers`. The supervisor ends this process when the
attempt ends. Nothing is written to the job's rows but events that say who helps.
"""

import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import FencedOutError
from app.shared.models import Job
from app.shared.outcomes import EventLevel, NewEvent
from app.shared.repositories import leases
from app.shared.repositories.leases import Lease
from app.shared.requests import JobRequest
from app.shared.settings import Settings
from app.shared.storage import WorkFolders, open_store
from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import CompressionCancelledError
from worker.attempt.delegation import Delegation
from worker.attempt.folders import JobFolders
from worker.attempt.inputs import collect_inputs
from worker.attempt.writer import ProgressWriter, Step
from worker.confined.messages import Advanced
from worker.failures import failure_of
from worker.processes.children import Launcher
from worker.processes.isolation import Isolation
from worker.processes.limits import ProcessLimits, group_name

_LOOK_SECONDS = 0.5
_log = logging.getLogger(__name__)


class Helper:
    """Help of one worker with a job.

    Args:
        settings: settings of the service.
        database: the database.
        lease: lease of the worker that runs the job.
        name: unique name of this help.
        worker: name of this worker.
        stop: set when it must stop.
        device: device to compute on, as the library names it.
        isolation: how the processes are confined that read the model.
        launch: starts these processes.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        lease: Lease,
        stop: threading.Event,
        device: str,
        *,
        name: str,
        worker: str,
        isolation: Isolation,
        launch: Launcher,
    ) -> None:
        self._settings = settings
        self._database = database
        self._stop = stop
        self._device = device
        self._name = name
        self._worker = worker
        self._isolation = isolation
        self._launch = launch
        self._writer = _Silent(database, lease, patience=settings.lease_seconds, max_profiles=settings.max_profiles)
        self._job_id = lease.job_id

    def run(self) -> None:
        """Help until the attempt has no work for others any more."""
        with self._database.snapshot() as session:
            job = session.get_one(Job, self._job_id)
        assert job.work_key is not None
        root = WorkFolders(self._settings.data_dir / "work").path(job.work_key)
        folders = JobFolders(root=root, helper=self._name)
        hidden = {str(path): "the data folder" for path in (self._settings.data_dir, self._settings.data_dir.resolve())}
        try:
            failure = failure_of(lambda: self._help(job, folders), location=lambda: (None, None), hidden=hidden)
        except CompressionCancelledError:
            return
        finally:
            shutil.rmtree(folders.own, ignore_errors=True)
        if failure is not None:
            _log.warning("cannot help: %s", failure.message)
            self._note(f"{self._worker} does not help: {failure.message}", "warning")

    def _help(self, job: Job, folders: JobFolders) -> None:
        # The attempt has fetched the inputs by then.
        while not (folders.output / WORK_FOLDER_NAME / "offer.json").is_file():
            if self._stop.wait(_LOOK_SECONDS):
                return
        request = JobRequest.model_validate(job.request)
        inputs = collect_inputs(
            self._settings,
            self._database,
            open_store(self._settings),
            job,
            request,
            folders=folders,
            device=self._device,
        )
        delegation = Delegation(
            self._job_id,
            folders,
            self._writer,
            self._stop,
            launch=self._launch,
            isolation=self._isolation,
            limits=self._limits,
        )
        downloaded = None
        if inputs.is_on_hub:
            downloaded = delegation.download(inputs.fetch_request(self._settings.log_level, measure_energy=False))
            inputs.hold_download(downloaded)
        self._note(f"{self._worker} helps with blocks of the model", "info")
        asked = inputs.compute_request("help", self._settings, folders.output, downloaded)
        delegation.compute(asked, readable=inputs.readable, network=False)

    def _limits(self, writable: Sequence[Path], user: int | None) -> ProcessLimits:
        return ProcessLimits(
            group_name(self._name),
            writable,
            cap=self._settings.max_job_memory_bytes,
            accelerated=self._device != "cpu",
            user=user,
        )

    def _note(self, message: str, level: EventLevel) -> None:
        try:
            self._writer.write(leases.note, NewEvent(type="message", level=level, message=message))
        except FencedOutError:
            _log.debug("%s has ended meanwhile", self._job_id)


class _Silent(ProgressWriter):
    """A writer that leaves progress to the attempt."""

    def on_progress(self, progress: Step | Advanced) -> None:
        """Do nothing."""
