"""The artifact of an earlier job, fetched from the store into the folder of the job that works on it."""

from collections.abc import Callable
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import ArtifactExpiredError, JobNotFoundError
from app.shared.models import Artifact, Job
from app.shared.repositories import jobs, outputs
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
    total, done = sum(artifact.size for artifact, _ in files), 0
    for artifact, stored in files:
        before_each(done / total if total else 0.0)
        target = folder / artifact.name
        # The store replaces a file as a whole: one that exists is complete.
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(stored, target)
        done += artifact.size
    return folder / kind


def _list_files(database: Database, job: Job, kind: ExportKind) -> list[tuple[Artifact, StoredFile]]:
    """Return the files of the export, and where they are stored."""
    gone = ArtifactExpiredError("the job whose result this one works on was deleted; compress the model again")
    if job.source_job_id is None:
        raise gone
    with database.snapshot() as session:
        try:
            source = jobs.get_job(session, job.source_job_id, job.owner)
        except JobNotFoundError:
            # Deleted since this job was read.
            raise gone from None
        artifacts = outputs.list_artifacts(session, source)
    exported = [artifact for artifact in artifacts if artifact.name.startswith(f"{kind}/")]
    files = [
        (artifact, StoredFile(key=artifact.storage_key, size=artifact.size, sha256=artifact.sha256))
        for artifact in exported
        if artifact.storage_key is not None
    ]
    if not files or len(files) < len(exported):
        raise ArtifactExpiredError(
            f"the files of {job.source_job_id} were deleted at the end of their retention period; run that job again"
        )
    return files
