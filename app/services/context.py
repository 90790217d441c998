"""The dependencies of service functions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from app.services.admission import Admission
from app.services.model_headers import ModelHeaders
from app.services.predictor_cache import PredictorCache
from app.shared.database import Database
from app.shared.errors import StorageError
from app.shared.repositories.removed import Removed
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, WorkFolders, open_store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The parts of a running service.

    Attributes:
        settings: the operator's settings.
        database: the database.
        artifacts: the store of artifacts and uploads.
        work: folders with the checkpoints of jobs.
        headers: headers of uploaded models.
        admission: checks of requests.
        predictors: recently used profiles.
        on_queued: called when a job is queued; it returns at once and never fails.
    """

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    work: WorkFolders
    headers: ModelHeaders
    admission: Admission
    predictors: PredictorCache
    on_queued: Callable[[], None]

    def remove(self, removed: Removed) -> None:
        """Remove files that no row refers to any more; call it after the commit. A sweep finds what is left of them."""
        try:
            for key in removed.storage_keys:
                self.artifacts.remove(key)
            if removed.work_key is not None:
                self.work.remove(removed.work_key)
        except StorageError as error:
            _log.warning("cannot remove files that are no longer used; the reconciler will: %s", error)


def open_context(settings: Settings, on_queued: Callable[[], None] = lambda: None) -> Context:
    """Open everything that a service needs; the database must be at the current schema.

    Args:
        settings: the operator's settings.
        on_queued: see `Context`.

    Raises:
        InvalidSettingsError: a package that the artifact store needs is not installed.
        StorageError: the data folder or the artifact store cannot be used.
    """
    database, artifacts = Database(settings.database), open_store(settings)
    work = WorkFolders(settings.data_dir / "work")
    headers = ModelHeaders(database, artifacts, work)
    return Context(
        settings=settings,
        database=database,
        artifacts=artifacts,
        work=work,
        headers=headers,
        admission=Admission(settings, headers.find),
        predictors=PredictorCache(),
        on_queued=on_queued,
    )
