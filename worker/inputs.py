"""What the library is given for a job: names become paths, uploads files, and a Hub token the right to ask."""

from dataclasses import dataclass
from pathlib import Path

from app.shared.catalog import find_dataset, find_local_model
from app.shared.database import Database
from app.shared.encryption import decrypt
from app.shared.logging import mask_secret
from app.shared.models import Job
from app.shared.repositories import uploads
from app.shared.requests import LOCAL, UPLOAD, JobRequest
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, StoredFile
from rocket_core.config import CompressionConfig
from rocket_core.hub import HubAccess

HUB_CACHE = "hub"
"""Folder, within a job's own, of what is fetched with its own token."""

_UPLOADED = "upload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What the library is given for a job.

    Attributes:
        model: folder of a checkpoint, or repository id on the Hub.
        revision: branch, tag or commit of a repository.
        config: all settings.
        hub: as whom the Hub is asked.
    """

    model: str
    revision: str | None
    config: CompressionConfig
    hub: HubAccess


def collect_inputs(
    settings: Settings,
    database: Database,
    store: ArtifactStore,
    job: Job,
    request: JobRequest,
    *,
    folder: Path,
    device: str,
) -> Inputs:
    """Finds what a job names, and brings uploads here.

    Args:
        settings: of the service.
        database: the rows.
        store: where uploads are.
        job: the job.
        request: what it asks for.
        folder: the job's own.
        device: what computes, as the library names it.

    Raises:
        RocketError: something is not there any more.
        AppError: an upload cannot be had, or the token not be read.
    """
    texts = [_dataset(settings, database, store, job, name, folder) for name in request.datasets]
    paths: dict[str, object] = {}
    if request.evaluate is not None:
        tasks = (find_dataset(settings, task) for task in request.evaluate.tasks)
        paths = {"dataset": texts[1], "tasks": tuple(tasks)}
    model = request.model_id
    return Inputs(
        model=str(find_local_model(settings, model)) if model.startswith(LOCAL) else model,
        revision=request.revision,
        config=request.compression_config(dataset=texts[0], evaluate=paths, device=device),
        hub=_hub_access(settings, job, folder),
    )


def _dataset(settings: Settings, database: Database, store: ArtifactStore, job: Job, dataset: str, folder: Path) -> str:
    """A text as the library wants it; an upload is brought here first."""
    if not dataset.startswith(UPLOAD):
        return find_dataset(settings, dataset)
    with database.snapshot() as session:
        upload = uploads.get_upload(session, job.owner, dataset.removeprefix(UPLOAD))
    # The name that the report gives to it.
    file = folder / f"{_UPLOADED}-{upload.id}{upload.suffix}"
    store.fetch(StoredFile(key=upload.storage_key, size=upload.size, sha256=upload.sha256), file)
    return str(file)


def _hub_access(settings: Settings, job: Job, folder: Path) -> HubAccess:
    """As whom the Hub is asked: with the job's own token and no other, if one came with it.

    What is fetched with that token goes into the job's own folder: from the shared cache others could read it.
    """
    if job.hub_token is None:
        token = settings.hf_token
        return HubAccess(
            token=None if token is None else token.get_secret_value(), quota_bytes=settings.hub_cache_bytes
        )
    secret = decrypt(settings, job.hub_token).get_secret_value()
    mask_secret(secret)
    return HubAccess(token=secret, cache=folder / HUB_CACHE)
