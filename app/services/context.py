"""What every service function needs."""

from dataclasses import dataclass

from app.services.admission import Admission
from app.shared.database import Database
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, WorkFolders, open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The parts of a running service.

    Attributes:
        settings: what the operator chose.
        database: the rows.
        artifacts: files to download, and uploads.
        work: checkpoints of jobs.
        admission: judges what clients ask for.
    """

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    work: WorkFolders
    admission: Admission


def open_context(settings: Settings) -> Context:
    """Opens everything a service needs; the database must have been upgraded.

    Raises:
        InvalidSettingsError: what the artifact store needs is not installed.
        StorageError: the data folder or the artifact store cannot be used.
    """
    return Context(
        settings=settings,
        database=Database(settings.database),
        artifacts=open_store(settings),
        work=WorkFolders(settings.data_dir / "work"),
        admission=Admission(settings),
    )
