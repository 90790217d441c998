"""Running jobs: one at a time, each in a child process that is watched until it ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from prometheus_client import CollectorRegistry

from app.shared.confinement import MemoryGroup
from app.shared.database import Database
from app.shared.errors import AppError, FencedOutError, JobStalledError
from app.shared.lifecycle import Status
from app.shared.logging import log_context
from app.shared.metrics import WorkerMetrics
from app.shared.models import Job
from app.shared.outcomes import JobError
from app.shared.repositories import leases
from app.shared.repositories.leases import Lease
from app.shared.requests import QUEUES, Queue
from app.shared.settings import Settings
from app.shared.storage import WorkFolders
from worker.device import Kind, device_environment
from worker.failures import ended, lost
from worker.memory import group_name
from worker.metrics import AttemptMeter

JOB_PROGRAM = ("-m", "worker.job")
"""What the interpreter runs for a job, given the job's id, the fence and the id of this process."""

# How soon a process that has ended, and a wish to stop, are noticed.
_LOOK_SECONDS = 0.1
# Of the column that says who holds a job, less the process id.
_NAME_LENGTH = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Equipment:
    """Which jobs a worker takes, and on what it runs them.

    Attributes:
        queues: the queues it takes jobs from.
        device: what computes; None leaves it to each job, which takes an accelerator where there is one.
    """

    queues: tuple[Queue, ...] = QUEUES
    device: Kind | None = None


ALL_ROUND = Equipment()
"""Takes every job, as the only worker of a machine does."""


class _Verdict(Enum):
    """How the watch over a process ended."""

    ENDED = auto()
    ASKED = auto()
    STALLED = auto()


class _Progress:
    """How long a job has not got further, by this machine's clock."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None
        self._since = time.monotonic()

    def see(self, job: Job) -> None:
        """Takes note of where the job is."""
        seen = (job.stage, job.progress, job.last_event, job.progressed_at)
        if seen != self._seen:
            self._seen = seen
            self.excuse()

    def excuse(self) -> None:
        """Starts anew: whether the job got further cannot be told."""
        self._since = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Since it was last seen to get further."""
        return time.monotonic() - self._since


class Runner:
    """Claims jobs and gives each to a process of its own.

    Args:
        settings: of the service.
        database: the rows.
        program: what a job's process runs.
        equipment: which jobs it takes.
        metrics: where attempts are counted; None keeps them to itself.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        program: Sequence[str] = JOB_PROGRAM,
        equipment: Equipment = ALL_ROUND,
        *,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._program = program
        self._equipment = equipment
        self._meter = AttemptMeter(database, metrics or WorkerMetrics(CollectorRegistry()))
        self._work = WorkFolders(settings.data_dir / "work")
        self.name = f"{socket.gethostname()[:_NAME_LENGTH]}:{os.getpid()}"
        self._slot = threading.Lock()
        # No `Event`: a signal handler that sets one could wait for a lock that its own thread holds.
        self._is_stopping = False
        self._grace_seconds = settings.cancel_grace_seconds

    def run(self, job_id: str | None = None) -> bool:
        """Runs a job to the end of one attempt.

        Args:
            job_id: the job; None takes the oldest that waits.

        Returns:
            Whether there was one to run; False also while another is running.

        Raises:
            AppError: the database or the data folder cannot be used.
        """
        if not self._slot.acquire(blocking=False):
            return False
        try:
            lease = None if self._is_stopping else self._claim(job_id)
            if lease is None:
                return False
            with log_context(job_id=lease.job_id), self._meter.measured(lease):
                self._supervise(lease)
            return True
        finally:
            self._slot.release()

    def stop(self) -> None:
        """Has the running job end at its next step, and takes no other."""
        self._is_stopping = True

    def abort(self) -> None:
        """Ends the running job at once; its next attempt goes on from the last layer that is finished."""
        self._grace_seconds = 0.0
        self._is_stopping = True

    def _claim(self, job_id: str | None) -> Lease | None:
        seconds, queues = self._settings.lease_seconds, self._equipment.queues
        with self._database.transaction() as session:
            if job_id is None:
                return leases.claim_next(session, worker=self.name, lease_seconds=seconds, queues=queues)
            return leases.claim_job(session, job_id, worker=self.name, lease_seconds=seconds, queues=queues)

    def _supervise(self, lease: Lease) -> None:
        try:
            with self._database.snapshot() as session:
                job = session.get_one(Job, lease.job_id)
            child = self._start(job, lease)
        except (OSError, AppError) as error:
            _log.error("cannot start a process for %s: %s", lease.job_id, error)
            self._settle(lease, lost("its process could not be started"))
            return
        with log_context(**_request_of(job)):
            _log.info("started", extra={"child": child.pid, "attempt": job.attempt})
            try:
                verdict = self._watch(child, lease)
            finally:
                # Nothing of this job may go on once its slot is free.
                _kill(child)
                # An attempt that was killed cannot do so itself.
                MemoryGroup.remove_left(group_name(lease.fence))
            _log.info("ended", extra={"child": child.pid, "exit_code": child.returncode})
            fault = ended(child.returncode) if verdict is _Verdict.ENDED else None
            if verdict is _Verdict.STALLED:
                fault = _stalled(self._settings.stall_seconds)
            self._settle(lease, fault)

    def _start(self, job: Job, lease: Lease) -> "subprocess.Popen[bytes]":
        assert job.work_key is not None
        # Empty, because transformers takes a folder of the working directory for a repository of that name.
        empty = self._work.path(job.work_key) / "empty"
        empty.mkdir(exist_ok=True)
        arguments = [
            lease.job_id,
            lease.fence,
            str(os.getpid()),
            *(f"--request={name}" for name in _request_of(job).values()),
        ]
        return subprocess.Popen(  # noqa: S603  # our own interpreter and module; the arguments are ids of ours
            [sys.executable, "-P", *self._program, *arguments, *self._device()],
            cwd=empty,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            # Out of reach of the terminal's Ctrl-C: the service decides when its jobs stop.
            start_new_session=True,
        )

    def _device(self) -> tuple[str, ...]:
        return () if self._equipment.device is None else ("--device", self._equipment.device)

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROCKET_")}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        # No request to the Hub to convert a model that has no safetensors.
        safe = {"DISABLE_SAFETENSORS_CONVERSION": "1"}
        device = {} if self._equipment.device is None else device_environment(self._equipment.device)
        return {**inherited, **quiet, **safe, **device, **self._settings.environment()}

    def _watch(self, child: "subprocess.Popen[bytes]", lease: Lease) -> _Verdict:
        """Waits for the process to end; where it does not and shall, its caller ends it."""
        progress = _Progress()
        look_at = time.monotonic() + self._settings.poll_seconds
        asked_at: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
                return _Verdict.ENDED if asked_at is None else _Verdict.ASKED
            now = time.monotonic()
            if asked_at is not None:
                if now - asked_at > self._grace_seconds:
                    _log.warning("killed, as it did not stop by itself")
                    return _Verdict.ASKED
                continue
            shall_stop = self._is_stopping
            if not shall_stop and now >= look_at:
                look_at = now + self._settings.poll_seconds
                shall_stop = self._shall_stop(lease, progress)
                if not shall_stop and progress.idle_seconds > self._settings.stall_seconds:
                    _log.warning("killed, as it made no progress", extra={"job_id": lease.job_id})
                    return _Verdict.STALLED
            if shall_stop:
                child.send_signal(signal.SIGTERM)
                asked_at = now

    def _shall_stop(self, lease: Lease, progress: _Progress) -> bool:
        try:
            with self._database.snapshot() as session:
                job = session.get(Job, lease.job_id)
        except AppError as error:
            _log.warning("cannot look after %s: %s", lease.job_id, error)
            # Nor can its process write how far it is.
            progress.excuse()
            return False
        # A job without this fence was taken away, or the process has just ended it and gets its grace to tidy up.
        if job is None or job.fence != lease.fence or job.status == Status.CANCELLING:
            return True
        progress.see(job)
        return False

    def _settle(self, lease: Lease, fault: JobError | None) -> None:
        """Says how the attempt ended unless the process has said it; without a fault the job is let go."""
        try:
            with self._database.transaction() as session:
                if fault is None:
                    leases.release_job(session, lease)
                    return
                leases.fail_job(session, lease, fault, backoff_seconds=self._settings.retry_backoff_seconds)
        except FencedOutError:
            _log.debug("%s was let go before", lease.job_id)
        except AppError as error:
            # The lease runs out, and the reconciler says it then.
            _log.warning("cannot say how %s ended: %s", lease.job_id, error)


def _request_of(job: Job) -> dict[str, str]:
    """The request that made a job, as the log names it."""
    return {} if job.request_id is None else {"request_id": job.request_id}


def _stalled(seconds: float) -> JobError:
    return JobError(
        code=JobStalledError.code,
        message=f"the job's process made no progress for {seconds:g} seconds; see the worker's log; where a "
        "layer of this model takes longer, the operator raises ROCKET_STALL_SECONDS",
        retryable=True,
    )


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Ends a process and all that it has started: it leads a group of its own."""
    # Not there any more, which macOS calls not permitted.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
