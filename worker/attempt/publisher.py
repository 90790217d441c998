"""Publication of a job's outcome: its files in the store, and the rows that show them."""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import DiskFullError, FencedOutError, StorageError
from app.shared.lifecycle import Status
from app.shared.outcomes import JobResult, NewArtifact
from app.shared.repositories import outputs, sweeps
from app.shared.storage import ArtifactStore, WorkFolders
from rocket_core.report.headlines import quality_headline
from rocket_core.report.schema import CompressionReport
from worker.attempt.artifacts import StoredResult, result_files, store_files
from worker.attempt.writer import ProgressWriter

_log = logging.getLogger(__name__)


class ArtifactPublisher:
    """Stores the files of an attempt, and publishes them together with the job's success; removes them otherwise.

    Args:
        store: the store.
        work: the work folders, of which a published job's is removed.
        database: the database.
        writer: writes rows under the lease.
        retention: how long the files are kept.
    """

    def __init__(
        self,
        store: ArtifactStore,
        work: WorkFolders,
        database: Database,
        writer: ProgressWriter,
        *,
        retention: timedelta,
    ) -> None:
        self._store = store
        self._work = work
        self._database = database
        self._writer = writer
        self._retention = retention

    def store(self, report: CompressionReport, output: Path, *, before_each: Callable[[], None]) -> StoredResult:
        """Store the files of a compression, or none of them.

        Args:
            report: the report, which names the exports.
            output: folder of the files.
            before_each: called before each file; its errors end the storing.

        Raises:
            StorageError: a file cannot be stored.
        """
        artifacts: list[NewArtifact] = []
        try:
            for artifact in store_files(self._store, result_files(report, output), output, before_each=before_each):
                artifacts.append(artifact)  # those before an error are removed
        except BaseException:
            self._remove(artifacts)
            raise
        return StoredResult(report=report, artifacts=tuple(artifacts))

    def publish(self, stored: StoredResult, work_key: str) -> None:
        """End the job as succeeded, with its report and files.

        Args:
            stored: the stored files.
            work_key: name of the job's work folder.

        Raises:
            FencedOutError: the job was taken from this worker.
            DiskFullError: the database's disk is full.
        """
        result = _result(stored.report)
        try:
            status = self._writer.write(
                outputs.succeed_job,
                result=result,
                report=stored.report,
                artifacts=stored.artifacts,
                retention=self._retention,
            )
        except FencedOutError:
            self._remove_unpublished(stored.artifacts)
            raise
        except DiskFullError:
            # If the database did not answer, it is unknown whether the artifacts are published; a sweep finds out.
            self._remove(stored.artifacts)
            raise
        if status == Status.SUCCEEDED:
            self._work.remove(work_key)
        else:
            self._remove(stored.artifacts)
        _log.info("the job has %s", status)

    def _remove_unpublished(self, artifacts: Sequence[NewArtifact]) -> None:
        # If the answer to a commit was lost, the job has ended and a retry is refused, but the artifacts are published.
        keys = {artifact.storage_key for artifact in artifacts}
        with self._database.snapshot() as session:
            orphans = sweeps.find_orphans(session, storage_keys=keys, work_keys=())
        self._remove([artifact for artifact in artifacts if artifact.storage_key in orphans])

    def _remove(self, artifacts: Sequence[NewArtifact]) -> None:
        try:
            for artifact in artifacts:
                self._store.remove(artifact.storage_key)
        except StorageError as error:
            # The outcome of the attempt matters more.
            _log.warning("cannot remove unused artifacts; the reconciler will: %s", error)


def _result(report: CompressionReport) -> JobResult:
    totals = report.totals
    return JobResult(
        achieved_ratio=totals.achieved_ratio,
        kept_parameters=totals.kept_parameters,
        compressible_parameters=totals.compressible_parameters,
        stored_bytes=totals.stored_bytes,
        dense_bytes=totals.dense_bytes,
        quality=quality_headline(report).value,
        quality_is_measured=report.evaluation is not None or report.healing is not None,
        verdict=report.verdict,
    )
