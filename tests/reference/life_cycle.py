"""A second implementation of the life cycle of jobs: no database, no HTTP, nothing of `app`; seconds are whole numbers.

Each method does to the jobs what the service should do, and returns what it should answer. A worker is a unique token.
"""

from dataclasses import dataclass, field

HELD = ("running", "cancelling")
TERMINAL = ("succeeded", "failed", "cancelled")

OK, ACCEPTED, NO_CONTENT, CONFLICT, UNPROCESSABLE = 200, 202, 204, 409, 422


@dataclass
class Life:
    """What is known about a job."""

    request: object
    max_attempts: int
    available_at: int
    status: str = "queued"
    stage: str | None = None
    progress: float = 0.0
    attempt: int = 0
    error: str | None = None
    retry_of: str | None = None
    worker: object = None
    lease_until: int | None = None
    finished_at: int | None = None
    has_started: bool = False
    has_checkpoints: bool = True
    is_told: bool = False
    is_allocated: bool = False
    layers: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    files_until: int | None = None
    events: list[tuple[str, str]] = field(default_factory=lambda: [("status", "queued")])


class Lives:
    """All jobs of a service, oldest first."""

    def __init__(self, *, max_attempts: int, lease: int, backoff: int, key_lifetime: int, retention: int) -> None:
        self.now = 0
        self.jobs: dict[str, Life] = {}
        self.deleted: list[str] = []
        self._keys: dict[str, tuple[object, str, int]] = {}
        self._max_attempts, self._lease, self._backoff = max_attempts, lease, backoff
        self._key_lifetime, self._retention = key_lifetime, retention

    # Actions of a client.

    def submit(self, new_id: str, request: object, key: str | None) -> tuple[int, str | None]:
        known = self._keys.get(key) if key else None
        if known and known[2] > self.now:
            return (OK, known[1]) if known[0] == request else (UNPROCESSABLE, None)
        self.jobs[new_id] = Life(request, self._max_attempts, self.now)
        if key:
            self._keys[key] = (request, new_id, self.now + self._key_lifetime)
        return ACCEPTED, new_id

    def cancel(self, job_id: str) -> int:
        job = self.jobs[job_id]
        if job.status == "queued":
            self._end(job, "cancelled")
        elif job.status == "running":
            self._move(job, "cancelling")
        return {"cancelled": OK, "cancelling": ACCEPTED}.get(job.status, CONFLICT)

    def retry(self, job_id: str, new_id: str) -> tuple[int, str | None]:
        old = self.jobs[job_id]
        if old.status not in {"failed", "cancelled"}:
            return CONFLICT, None
        for other_id, other in self.jobs.items():
            if other.retry_of == job_id:
                return ACCEPTED, other_id
        new = self.jobs[new_id] = Life(old.request, self._max_attempts, self.now, retry_of=job_id)
        if old.has_checkpoints:
            new.layers, new.is_allocated, old.has_checkpoints = list(old.layers), old.is_allocated, False
        return ACCEPTED, new_id

    def delete(self, job_id: str) -> int:
        if self.jobs[job_id].status not in TERMINAL:
            return CONFLICT
        del self.jobs[job_id]
        self.deleted.append(job_id)
        self._keys = {key: known for key, known in self._keys.items() if known[1] != job_id}
        for other in self.jobs.values():
            if other.retry_of == job_id:
                other.retry_of = None
        return NO_CONTENT

    # Actions of a worker.

    def waiting(self) -> list[str]:
        return [job_id for job_id, job in self.jobs.items() if job.status == "queued" and job.available_at <= self.now]

    def claim(self, job_id: str, worker: object) -> bool:
        if job_id not in self.waiting():
            return False
        job = self.jobs[job_id]
        job.attempt, job.worker, job.lease_until = job.attempt + 1, worker, self.now + self._lease
        job.has_started = True
        self._move(job, "running")
        return True

    def held_by(self, worker: object) -> Life | None:
        return next((job for job in self.jobs.values() if job.status in HELD and job.worker is worker), None)

    def beat(self, job: Life) -> str:
        job.lease_until = self.now + self._lease
        return job.status

    def report_progress(self, job: Life, stage: str, progress: float) -> None:
        if stage != job.stage:
            job.events.append(("stage", stage))
        job.stage, job.progress = stage, max(job.progress, progress)

    def profile(self, job: Life, layer: str) -> bool:
        if layer in job.layers:
            return False
        job.layers.append(layer)
        job.events.append(("layer", layer))
        return True

    def allocate(self, job: Life) -> bool:
        if job.is_allocated:
            return False
        job.is_allocated = True
        job.events.append(("allocation", "allocated"))
        return True

    def release(self, job: Life) -> str:
        if job.status == "running":
            job.attempt -= 1
        self._requeue(job, self.now)
        return job.status

    def fail(self, job: Life, code: str, *, retryable: bool) -> str:
        job.events.append(("error", code))
        if retryable and job.attempt < job.max_attempts:
            self._requeue(job, self.now + self._backoff * 2 ** (job.attempt - 1))
        else:
            self._end(job, "failed", code)
        return job.status

    def succeed(self, job: Life, files: dict[str, bytes]) -> str:
        if job.status == "running":
            job.files, job.files_until, job.progress, job.has_checkpoints = (
                files,
                self.now + self._retention,
                1.0,
                False,
            )
        self._end(job, "succeeded")
        return job.status

    # Effects of time.

    def reclaim(self, *, everything: bool) -> list[str]:
        taken = [
            job_id
            for job_id, job in self.jobs.items()
            if job.status in HELD and (everything or job.lease_until <= self.now)
        ]
        for job in map(self.jobs.__getitem__, taken):
            job.events.append(("lease_lost", "warning"))
            if job.attempt < job.max_attempts:
                self._requeue(job, self.now)
            else:
                self._end(job, "failed", "worker_lost")
        return taken

    def tell(self, announced: set[str]) -> list[str]:
        """Mark announced jobs, and return those that still wait for an announcement."""
        for job_id in announced & set(self.jobs):
            self.jobs[job_id].is_told = True
        return [job_id for job_id, job in self.jobs.items() if job.status == "queued" and not job.is_told]

    def forget_checkpoints(self) -> None:
        for job in self.jobs.values():
            if job.status in TERMINAL and job.finished_at <= self.now - self._retention:
                job.has_checkpoints = False

    def _requeue(self, job: Life, available_at: int) -> None:
        if job.status == "cancelling":
            self._end(job, "cancelled")
        else:
            job.available_at = available_at
            self._move(job, "queued")

    def _end(self, job: Life, status: str, error: str | None = None) -> None:
        if job.status == "cancelling":
            status, error = "cancelled", None
        job.error, job.finished_at = error, self.now
        self._move(job, status)

    @staticmethod
    def _move(job: Life, status: str) -> None:
        job.status, job.is_told = status, False
        job.events.append(("status", status))
        if status not in HELD:
            job.worker = job.lease_until = None
