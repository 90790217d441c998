"""What every service function needs."""

from collections.abc import Callable
from dataclasses import dataclass

from app.services.admission import Admission
from app.services.predictor_cache import WhatIfs
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
        what_ifs: profiles that were asked about last.
        on_queued: called when a job waits in the queue; it returns at once and never fails.
    """

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    work: WorkFolders
    admission: Admission
    what_ifs: WhatIfs
    on_queued: Callable[[], None]


def open_context(settings: Settings, on_queued: Callable[[], None] = lambda: None) -> Context:
    """Opens everything a service needs; the database must have been upgraded.

    Args:
        settings: what the operator chose.
        on_queued: see `Context`.

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
        what_ifs=WhatIfs(),
        on_queued=on_queued,
    )
