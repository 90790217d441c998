"""Running jobs one at a time, each in a child process that is watched until it ends."""

import functools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from app.shared.requests import QUEUES, JobRequest, Queue
from app.shared.settings import Settings
from app.shared.storage import WorkFolders
from worker.device import Kind, device_environment
from worker.failures import ended, lost
from worker.metrics import measured_attempt
from worker.processes.isolation import choose_mechanism
from worker.processes.job_processes import JOB_PROGRAM, FreshJobs, JobProcess, JobProcesses, JobStart
from worker.processes.limits import group_name

# How soon the end of a process, or a request to stop, is noticed.
_LOOK_SECONDS = 0.1
# Length of the column with a job's worker, less the process id.
_NAME_LENGTH = 100
# More than the jobs that run at once on all workers.
_REMEMBERED = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Equipment:
    """The jobs that a worker takes, and the device that they run on.

    Attributes:
        queues: the queues it takes jobs from.
        device: the device; None lets each job choose, which takes an accelerator if there is one.
    """

    queues: tuple[Queue, ...] = QUEUES
    device: Kind | None = None


ALL_ROUND = Equipment()
"""Every job, for the only worker of a machine."""


class _WatchResult(Enum):
    """Reason why watching a process ended."""

    ENDED = auto()
    STOPPED = auto()
    STALLED = auto()


class _Progress:
    """How long a job has made no progress, by this machine's clock."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] | None = None
        self._since = time.monotonic()

    def see(self, job: Job) -> None:
        """Record the job's progress."""
        seen = (job.stage, job.progress, job.last_event, job.progressed_at)
        if seen != self._seen:
            self._seen = seen
            self.reset()

    def reset(self) -> None:
        """Restart the count, as it is unknown whether the job made progress."""
        self._since = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the job last made progress."""
        return time.monotonic() - self._since


class Runner:
    """Claims jobs and runs each in its own process.

    Args:
        settings: settings of the service.
        database: the database.
        program: interpreter arguments of a job's process.
        equipment: which jobs it takes.
        metrics: where attempts are counted; None does not expose them.
        processes: starts the processes of jobs; None starts them as programs. `close` closes it.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        program: Sequence[str] = JOB_PROGRAM,
        equipment: Equipment = ALL_ROUND,
        *,
        metrics: WorkerMetrics | None = None,
        processes: JobProcesses | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._equipment = equipment
        self._metrics = metrics or WorkerMetrics(CollectorRegistry())
        self._work = WorkFolders(settings.data_dir / "work")
        self.name = f"{socket.gethostname()[:_NAME_LENGTH]}:{os.getpid()}"
        self._slot = threading.Lock()
        # Fences of attempts that this worker cannot help, or has helped to the end.
        self._not_helped: deque[str] = deque(maxlen=_REMEMBERED)
        # Not an `Event`: a signal handler that sets one could deadlock on a lock that its own thread holds.
        self._is_stopping = False
        self._grace_seconds = settings.cancel_grace_seconds
        self._processes = FreshJobs(program) if processes is None else processes

    def prepare(self) -> None:
        """Get ready in the background to start jobs faster; `close` must be called then."""
        self._processes.prepare()

    def close(self) -> None:
        """End what `prepare` started; no job may be running."""
        self._processes.close()

    def run(self, job_id: str | None = None) -> bool:
        """Run one attempt at a job.

        Args:
            job_id: the job; None takes the oldest queued job.

        Returns:
            Whether there was a job to run; False also while another is running.

        Raises:
            AppError: the database or the data folder cannot be used.
        """
        if not self._slot.acquire(blocking=False):
            return False
        try:
            # A job that is claimed is not delayed by a process that is still importing.
            while not self._is_stopping and not self._processes.is_ready():
                time.sleep(_LOOK_SECONDS)
            lease = None if self._is_stopping else self._claim(job_id)
            if lease is None:
                return False
            with log_context(job_id=lease.job_id), measured_attempt(self._database, self._metrics, lease):
                self._supervise(lease)
            return True
        finally:
            self._slot.release()

    def help(self) -> bool:
        """Work on blocks of a job that another worker runs, until that ends or a job waits for this one.

        Returns:
            Whether there was one.

        Raises:
            AppError: the database or the data folder cannot be used.
        """
        if not self._settings.help_jobs or self._is_stopping or not self._slot.acquire(blocking=False):
            return False
        try:
            with self._database.snapshot() as session:
                found = leases.find_running(
                    session, worker=self.name, queues=self._equipment.queues, without=self._not_helped
                )
            if found is None:
                return False
            job, lease = found
            self._not_helped.append(lease.fence)
            # Work on an artifact has no blocks that could be shared.
            if JobRequest.model_validate(job.request).on_source is None and not self._help(job, lease):
                self._not_helped.remove(lease.fence)
            return True
        finally:
            self._slot.release()

    def stop(self) -> None:
        """Stop the running job at its next step, and claim no other."""
        self._is_stopping = True

    def abort(self) -> None:
        """Kill the running job without waiting; its next attempt resumes after the last finished layer."""
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
            self._record_outcome(lease, lost("the job's process could not be started; see the worker's log"))
            return
        with log_context(**_request_of(job)):
            _log.info("started", extra={"child": child.pid, "attempt": job.attempt})
            try:
                result = self._watch(child, functools.partial(self._should_stop, lease))
            finally:
                # No process of this job may run once the slot is free.
                exit_code = _kill(child)
                # A killed attempt cannot remove it itself.
                MemoryGroup.remove_left(group_name(lease.fence))
            _log.info("ended", extra={"child": child.pid, "exit_code": exit_code})
            fault = ended(exit_code) if result is _WatchResult.ENDED else None
            if result is _WatchResult.STALLED:
                fault = _stalled(self._settings.stall_seconds)
            self._record_outcome(lease, fault)

    def _help(self, job: Job, lease: Lease) -> bool:
        """Help with a job; return whether the process has ended by itself."""
        name = secrets.token_hex(16)
        with log_context(job_id=job.id):
            child = self._start(job, lease, f"--helper={name}", f"--worker={self.name}")
            _log.info("helping", extra={"child": child.pid})
            try:
                result = self._watch(child, functools.partial(self._should_leave, lease))
            finally:
                _kill(child)
                MemoryGroup.remove_left(group_name(name))
        return result is _WatchResult.ENDED

    def _start(self, job: Job, lease: Lease, *more: str) -> JobProcess:
        assert job.work_key is not None
        # Empty, because transformers mistakes a folder in the working directory for a repository of that name.
        empty = self._work.path(job.work_key) / "empty"
        empty.mkdir(exist_ok=True)
        options = [f"--request={name}" for name in _request_of(job).values()]
        if self._equipment.device is not None:
            options += ["--device", self._equipment.device]
        options += ["--isolation", choose_mechanism(self._settings.isolation), *more]
        return self._processes.start(
            JobStart(
                arguments=(lease.job_id, lease.fence, *options),
                folder=empty,
                environment=job_environment(self._settings, self._equipment),
            )
        )

    def _watch(self, child: JobProcess, should_stop_now: Callable[[_Progress], bool]) -> _WatchResult:
        """Wait until the process ends or must be killed, which is up to the caller."""
        progress = _Progress()
        check_at = time.monotonic() + self._settings.poll_seconds
        stopped_at: float | None = None
        while True:
            if child.wait(_LOOK_SECONDS) is not None:
                return _WatchResult.ENDED if stopped_at is None else _WatchResult.STOPPED
            now = time.monotonic()
            if stopped_at is not None:
                if now - stopped_at > self._grace_seconds:
                    _log.warning("killed, as it did not stop in time")
                    return _WatchResult.STOPPED
                continue
            should_stop = self._is_stopping
            if not should_stop and now >= check_at:
                check_at = now + self._settings.poll_seconds
                should_stop = should_stop_now(progress)
                if not should_stop and progress.idle_seconds > self._settings.stall_seconds:
                    _log.warning("killed, as it made no progress")
                    return _WatchResult.STALLED
            if should_stop:
                child.send_signal(signal.SIGTERM)
                stopped_at = now

    def _should_stop(self, lease: Lease, progress: _Progress) -> bool:
        try:
            with self._database.snapshot() as session:
                job = session.get(Job, lease.job_id)
        except AppError as error:
            _log.warning("cannot check the status of %s: %s", lease.job_id, error)
            # Its process cannot write its progress either.
            progress.reset()
            return False
        # A job without this fence was reclaimed, or the process has just ended it and has the grace period to clean up.
        if job is None or job.fence != lease.fence or job.status == Status.CANCELLING:
            return True
        progress.see(job)
        return False

    def _should_leave(self, lease: Lease, progress: _Progress) -> bool:
        """Return whether to stop helping, because the attempt has ended or a job waits."""
        # The progress of the job is a matter of the worker that has it.
        progress.reset()
        try:
            with self._database.snapshot() as session:
                job = session.get(Job, lease.job_id)
                has_ended = job is None or job.fence != lease.fence or job.status != Status.RUNNING
                return has_ended or leases.is_any_available(session, self._equipment.queues)
        except AppError as error:
            _log.warning("cannot check the status of %s: %s", lease.job_id, error)
            return False

    def _record_outcome(self, lease: Lease, fault: JobError | None) -> None:
        """Write the outcome of the attempt unless the process did; without a fault the job is released."""
        try:
            with self._database.transaction() as session:
                if fault is None:
                    leases.release_job(session, lease)
                    return
                leases.fail_job(session, lease, fault, backoff_seconds=self._settings.retry_backoff_seconds)
        except FencedOutError:
            _log.debug("%s was released already", lease.job_id)
        except AppError as error:
            # The reconciler does so when the lease has expired.
            _log.warning("cannot record how %s ended: %s", lease.job_id, error)


def _request_of(job: Job) -> dict[str, str]:
    """Return the id of the request that created a job, as a field for the log."""
    return {} if job.request_id is None else {"request_id": job.request_id}


def _stalled(seconds: float) -> JobError:
    return JobError(
        code=JobStalledError.code,
        message=f"the job's process made no progress for {seconds:g} seconds; see the worker's log; if a "
        "layer of this model takes longer, ask the operator to raise ROCKET_STALL_SECONDS",
        retryable=True,
    )


def _kill(child: JobProcess) -> int:
    """Kill a process and everything that it has started, by the process group that it leads; return its exit code."""
    # The process no longer exists, which macOS reports as a permission error.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    exit_code = child.wait()
    child.close()
    assert exit_code is not None
    return exit_code


def job_environment(settings: Settings, equipment: Equipment) -> dict[str, str]:
    """Return the variables of a job's process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROCKET_")}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # Do not ask the Hub to convert a model without safetensors.
    safe = {"DISABLE_SAFETENSORS_CONVERSION": "1"}
    device = {} if equipment.device is None else device_environment(equipment.device)
    return {**inherited, **quiet, **safe, **device, **settings.environment()}
