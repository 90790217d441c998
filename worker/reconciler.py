"""Recovery from crashes and lost messages. Sweeps are idempotent and safe to run concurrently."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session

from app.shared.database import Database
from app.shared.errors import StorageError, StorageUnavailableError
from app.shared.metrics import WorkerMetrics
from app.shared.repositories import jobs, models, profiles, sessions, sweeps, webhooks
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, WorkFolders, is_bound_to, open_store

# Files younger than this may belong to a row that is not written yet: a job stores all its artifacts first, which takes
# hours for a large model and a slow connection to the store.
_ORPHAN_SECONDS = 86400.0
# Writing a file to the store never takes longer than this, nor does a work folder exist longer without its row.
_UNFINISHED_SECONDS = 3600.0
_SECONDS_BETWEEN_CLEANINGS = 600.0
_DELIVERY_RETENTION = timedelta(days=30)
# A correction of the clock by no more than this does not delay reclaiming leases.
_LEAP_SECONDS = 1.0
_log = logging.getLogger(__name__)
Deleted = TypeVar("Deleted", bound=Sequence[Any] | int)


class Reconciler:
    """Sweeper that notifies workers of jobs again, reclaims them from dead workers, and removes expired data.

    Args:
        settings: settings of the service.
        database: the database.
        metrics: where sweeps are counted; None does not expose them.
    """

    def __init__(self, settings: Settings, database: Database, *, metrics: WorkerMetrics | None = None) -> None:
        self._settings = settings
        self._database = database
        self._metrics = metrics or WorkerMetrics(CollectorRegistry())
        self._artifacts = open_store(settings)
        self._work = WorkFolders(settings.data_dir / "work")
        self._cleaned_at = float("-inf")
        self._clock_offset = time.time() - time.monotonic()
        self._patient_until = float("-inf")

    def sweep(self) -> None:
        """Run all steps that are due.

        Raises:
            AppError: the database or the data folder cannot be used; the next sweep retries.
        """
        self.reclaim()
        self.renotify()
        self._metrics.note_sweep()
        if time.monotonic() - self._cleaned_at >= _SECONDS_BETWEEN_CLEANINGS:
            self._cleaned_at = time.monotonic()
            self.clean()

    def reclaim(self) -> None:
        """Reclaim jobs whose lease has expired."""
        if self._has_just_woken():
            return
        with self._database.transaction() as session:
            reclaimed = sweeps.reclaim_expired(session)
        self._metrics.count_reclaimed(len(reclaimed))
        for job_id in reclaimed:
            _log.warning("reclaimed, as its worker stopped renewing the lease", extra={"job_id": job_id})

    def _has_just_woken(self) -> bool:
        """Return whether this machine slept, or its clock was set, less than a lease ago.

        The leases of live jobs have expired then too, and this gives them time to renew.
        """
        offset = time.time() - time.monotonic()
        if offset - self._clock_offset > _LEAP_SECONDS:
            _log.info(
                "the clock jumped by %.0f seconds; expired leases get time to be renewed", offset - self._clock_offset
            )
            self._patient_until = time.monotonic() + self._settings.lease_seconds
        self._clock_offset = offset
        return time.monotonic() < self._patient_until

    def renotify(self) -> None:
        """Queue another notification of jobs whose last one was long ago; a relay sends it."""
        with self._database.transaction() as session:
            sweeps.renotify(session, notify_seconds=self._settings.notify_seconds)

    def clean(self) -> None:
        """Remove expired data, and files that no row refers to."""
        retention = timedelta(days=self._settings.artifact_retention_days)
        with self._database.transaction() as session:
            sweeps.forget_checkpoints(session, retention=retention)
            sweeps.forget_idempotency_keys(session)
            sessions.forget_sessions(session)
            webhooks.forget_deliveries(session, retention=_DELIVERY_RETENTION)
        settings = self._settings
        if settings.job_retention_days is not None:
            self._forget_jobs(settings.job_retention_days)
        if settings.profile_retention_days is not None:
            self._forget_profiles(settings.profile_retention_days)
        self._forget_models(settings.model_retention_days)
        for expired in self._batches(sweeps.expire_artifacts):
            self._remove(self._artifacts, expired)
        with self._database.snapshot() as session:
            identity = sweeps.identity(session)
        if self._may_sweep(is_bound_to(self._settings.data_dir, identity), "the data folder"):
            self._remove_work()
        if self._may_sweep(self._artifacts.is_bound_to(identity), "the artifact store"):
            self._remove_artifacts()

    def _may_sweep(self, is_ours: bool, name: str) -> bool:
        if not is_ours:
            _log.warning(
                "orphaned files are not deleted, as %s belongs to another database; to have them deleted, "
                "remove `database` there",
                name,
            )
        return is_ours

    def _remove_work(self) -> None:
        # Listed before the rows are read: folders created in between are too young to be listed.
        keys = self._work.keys(before=time.time() - _UNFINISHED_SECONDS)
        with self._database.snapshot() as session:
            orphans = sweeps.find_orphans(session, storage_keys=(), work_keys=keys)
        self._remove(self._work, orphans)

    def _remove_artifacts(self) -> None:
        keys = self._artifacts.keys(before=time.time() - _ORPHAN_SECONDS)
        with self._database.snapshot() as session:
            orphans = sweeps.find_orphans(session, storage_keys=keys, work_keys=())
        self._remove(self._artifacts, orphans)
        unfinished = self._artifacts.remove_unfinished(before=time.time() - _UNFINISHED_SECONDS)
        if orphans or unfinished:
            _log.info("removed %d files that belong to no job, and %d unfinished", len(orphans), unfinished)

    def _forget_jobs(self, days: float) -> None:
        for deleted in self._batches(partial(jobs.delete_ended, retention=timedelta(days=days))):
            _log.info("deleted %d jobs that ended more than %g days ago", len(deleted), days)
            self._remove(self._artifacts, [key for job in deleted for key in job.storage_keys])
            self._remove(self._work, [job.work_key for job in deleted if job.work_key is not None])

    def _forget_profiles(self, days: float) -> None:
        for deleted in self._batches(partial(profiles.delete_unused, retention=timedelta(days=days))):
            _log.info("deleted %d profiles that no job has used for %g days", deleted, days)

    def _forget_models(self, days: float | None) -> None:
        unfinished = timedelta(hours=self._settings.unfinished_model_hours)
        retention = None if days is None else timedelta(days=days)
        for deleted in self._batches(partial(models.delete_old, unfinished=unfinished, retention=retention)):
            _log.info("deleted %d uploaded models that were abandoned, or unused for long", len(deleted))
            self._remove(self._artifacts, [key for model in deleted for key in model.storage_keys])
            self._remove(self._work, [model.work_key for model in deleted if model.work_key is not None])

    def _batches(self, delete: Callable[[Session], Deleted]) -> Iterator[Deleted]:
        """Delete rows, one transaction at a time, and yield what each has deleted, until nothing is left."""
        while True:
            with self._database.transaction() as session:
                deleted = delete(session)
            if not deleted:
                return
            yield deleted

    def _remove(self, storage: ArtifactStore | WorkFolders, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                storage.remove(key)
            except StorageUnavailableError:
                # Each of the others would take as long to fail, and leases are not reclaimed meanwhile.
                raise
            except StorageError as error:
                # A file that cannot be removed must not keep the others from being removed.
                _log.warning("removing %s: %s", key, error)
