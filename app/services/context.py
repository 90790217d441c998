"""What every service function needs."""

from dataclasses import dataclass

from app.services.admission import Admission
from app.shared.database import Database
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, WorkFolders


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The parts of a running service.

    Attributes:
        settings: what the operator chose.
        database: the rows.
        artifacts: files to download.
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
        StorageError: the data folder cannot be used.
    """
    return Context(
        settings=settings,
        database=Database(settings.database),
        artifacts=ArtifactStore(settings.data_dir / "artifacts"),
        work=WorkFolders(settings.data_dir / "work"),
        admission=Admission(settings),
    )
