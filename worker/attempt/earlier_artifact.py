"""The artifact of an earlier job, fetched from the store into the folder of the job that works on it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import ArtifactExpiredError
from app.shared.models import Artifact, Job
from app.shared.repositories import sources
from app.shared.storage import ArtifactStore, StoredFile
from rocket_core.engines import ExportKind


def fetch_earlier_artifact(
    database: Database,
    store: ArtifactStore,
    job: Job,
    kind: ExportKind,
    folder: Path,
    *,
    before_each: Callable[[float], None],
) -> Path:
    """Fetch an export of the job that a job refers to; files that an earlier attempt has fetched are kept.

    Args:
        database: the database.
        store: where artifacts are.
        job: the job that works on the artifact.
        kind: the export.
        folder: the folder to fetch it into.
        before_each: called before each file with the fraction of the bytes that is complete; its errors end the work.

    Returns:
        The folder of the export.

    Raises:
        ArtifactExpiredError: the earlier job or its files were deleted.
        StorageError: a file cannot be fetched.
    """
    files = _list_files(database, job, kind)
    total, done = sum(artifact.size for artifact in files), 0
    for artifact in files:
        assert artifact.storage_key is not None, "it has not expired"
        before_each(done / total if total else 0.0)
        target = folder / artifact.name
        # The store replaces a file as a whole: one that exists is complete.
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(StoredFile(key=artifact.storage_key, size=artifact.size, sha256=artifact.sha256), target)
        done += artifact.size
    return folder / kind


def _list_files(database: Database, job: Job, kind: ExportKind) -> Sequence[Artifact]:
    """Return the files of the export."""
    if job.source_job_id is None:
        raise ArtifactExpiredError("the job whose result this one works on was deleted; compress the model again")
    with database.snapshot() as session:
        return sources.list_source_files(session, job.owner, job.source_job_id, kind)
