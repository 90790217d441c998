"""Inputs of a job's processes: paths for names, files for uploads, and access to the Hub."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.file_download import repo_folder_name

from app.shared.catalog import find_dataset, find_local_model
from app.shared.database import Database
from app.shared.encryption import decrypt
from app.shared.errors import StorageError
from app.shared.logging import mask_secret
from app.shared.models import Job
from app.shared.repositories import uploads
from app.shared.requests import UPLOAD, JobRequest
from app.shared.settings import Settings
from app.shared.storage import ArtifactStore, StoredFile
from rocket_core.config import BUILTIN_DATASET, HUB_TASKS, CompressionConfig
from rocket_core.errors import HubCacheBusyError
from rocket_core.hub import cache as hub_cache
from rocket_core.hub.repository import HubAccess
from rocket_core.inspection.checks.media_lines import names_media
from rocket_core.inspection.files.dataset_names import is_hub_dataset
from worker.attempt.folders import JobFolders
from worker.attempt.uploaded_models import fetch_model
from worker.confined.messages import ComputeRequest, Downloaded, FetchRequest, LogLevel, Task

_UPLOADED = "upload"
_PROFILES = "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Inputs of a job's processes.

    Attributes:
        model: folder of a checkpoint, or repository id on the Hub; only its name if the job does not read it.
        is_on_hub: whether it is a repository that the job reads.
        revision: branch, tag or commit of a repository.
        config: all settings.
        hub: credentials and cache for access to the Hub.
        reads_model: whether the job reads the model itself.
    """

    model: str
    is_on_hub: bool
    revision: str | None
    config: CompressionConfig
    hub: HubAccess
    reads_model: bool = True

    @property
    def needs_network(self) -> bool:
        """Whether text or tasks come from the Hub."""
        return any(is_hub_dataset(name) or name in HUB_TASKS for name in self._texts)

    @property
    def readable(self) -> tuple[Path, ...]:
        """Files and folders that the library reads."""
        texts = [Path(text) for text in self._texts if Path(text).is_absolute()]
        # Images are in the folder of the file that names them, or below.
        folders = (text.parent for text in texts if text.suffix.lower() == ".jsonl" and names_media(text))
        model = (self._hub_folder if self.is_on_hub else Path(self.model),) if self.reads_model else ()
        return (*model, *texts, *folders)

    def fetch_request(self, log_level: LogLevel, *, measure_energy: bool) -> FetchRequest:
        """Return the request that downloads the model."""
        return FetchRequest(
            log_level=log_level,
            model=self.model,
            revision=self.revision,
            config=self.config,
            cache=self._hub_cache,
            quota_bytes=self.hub.quota_bytes,
            token=self.hub.token or get_token(),
            measure_energy=measure_energy,
        )

    def compute_request(
        self, task: Task, settings: Settings, output: Path, downloaded: Downloaded | None
    ) -> ComputeRequest:
        """Return the request that starts a computation, without a token or what only some tasks need.

        Args:
            task: what to compute.
            settings: settings of the service.
            output: folder to write to.
            downloaded: the model from the Hub; None if it is not there.
        """
        # Shared by all tenants: using a profile takes the same model and the same text.
        profiles = settings.data_dir / _PROFILES
        profiles.mkdir(mode=0o700, exist_ok=True)
        return ComputeRequest(
            log_level=settings.log_level,
            task=task,
            model=self.model,
            folder=None if downloaded is None else downloaded.folder,
            commit=None if downloaded is None else downloaded.commit,
            revision=self.revision,
            output=output,
            config=self.config,
            profiles=profiles,
            profiles_bytes=settings.profile_cache_bytes,
            measure_energy=settings.measure_energy,
            token=None,
            download=None if downloaded is None else downloaded.cost,
        )

    def hold_download(self, downloaded: Downloaded) -> None:
        """Keep a downloaded model in the cache until this process ends.

        Raises:
            StorageError: the folder is not the model's.
            HubCacheBusyError: the model was removed to make room for another before it could be held.
        """
        if not downloaded.folder.resolve().is_relative_to(self._hub_folder.resolve()):
            raise StorageError("the model was downloaded to the wrong folder; retry the job")
        if self.hub.quota_bytes is not None:
            hub_cache.hold(self._hub_folder)
            if not downloaded.folder.is_dir():
                raise HubCacheBusyError(
                    "the model was evicted from the Hub cache to make room for another; retry the job"
                )

    @property
    def _hub_cache(self) -> Path:
        return self.hub.cache or Path(constants.HF_HUB_CACHE)

    @property
    def _hub_folder(self) -> Path:
        return self._hub_cache / repo_folder_name(repo_id=self.model, repo_type="model")

    @property
    def _texts(self) -> tuple[str, ...]:
        evaluate = self.config.evaluate
        evaluated = () if evaluate is None else (evaluate.dataset, *evaluate.tasks)
        return (self.config.calibration.dataset, *evaluated)


def collect_inputs(
    settings: Settings,
    database: Database,
    store: ArtifactStore,
    job: Job,
    request: JobRequest,
    *,
    folders: JobFolders,
    device: str,
    before_each: Callable[[], None] = lambda: None,
) -> Inputs:
    """Return the inputs that a job names, and fetch its uploads to this machine.

    Args:
        settings: settings of the service.
        database: the database.
        store: where uploads are.
        job: the job.
        request: the job's request.
        folders: folders of the job.
        device: device to compute on, as the library names it.
        before_each: called before each piece of an uploaded model is fetched.

    Raises:
        RocketError: an input no longer exists.
        AppError: an upload cannot be fetched, or the token cannot be decrypted.
    """
    texts = {name: _dataset(settings, database, store, job, name, folders.root) for name in request.datasets}
    paths: dict[str, object] = {}
    if request.evaluate is not None:
        tasks = (find_dataset(settings, task) for task in request.evaluate.tasks)
        paths = {"dataset": texts[request.evaluate.dataset], "tasks": tuple(tasks)}
    model = request.model_id
    if request.reads_model and request.uploaded_model is not None:
        model = str(
            fetch_model(
                database,
                store,
                job.owner,
                request.uploaded_model,
                folder=folders.uploaded,
                before_each=before_each,
            )
        )
    elif request.reads_model and not request.is_on_hub:
        model = str(find_local_model(settings, model))
    return Inputs(
        model=model,
        is_on_hub=request.is_on_hub and request.reads_model,
        revision=request.revision,
        # The calibration of the job that is evaluated does not matter, and may be gone, unless both read the same text.
        config=request.compression_config(
            dataset=texts.get(request.calibration.dataset, BUILTIN_DATASET), evaluate=paths, device=device
        ),
        hub=_hub_access(settings, job, folders),
        reads_model=request.reads_model,
    )


def _dataset(settings: Settings, database: Database, store: ArtifactStore, job: Job, dataset: str, folder: Path) -> str:
    """Return the name or path of a dataset for the library; fetch an upload first."""
    if not dataset.startswith(UPLOAD):
        return find_dataset(settings, dataset)
    with database.snapshot() as session:
        upload = uploads.get_upload(session, job.owner, dataset.removeprefix(UPLOAD))
    # The report shows this name.
    file = folder / f"{_UPLOADED}-{upload.id}{upload.suffix}"
    store.fetch(StoredFile(key=upload.storage_key, size=upload.size, sha256=upload.sha256), file)
    return str(file)


def _hub_access(settings: Settings, job: Job, folders: JobFolders) -> HubAccess:
    """Return the access to the Hub: only with the job's own token, if it has one.

    What is downloaded with that token goes into the job's own folder: other tenants could read it in the shared cache.
    """
    if job.hub_token is None:
        token = settings.hf_token
        return HubAccess(
            token=None if token is None else token.get_secret_value(), quota_bytes=settings.hub_cache_bytes
        )
    secret = decrypt(settings, job.hub_token).get_secret_value()
    mask_secret(secret)
    return HubAccess(token=secret, cache=folders.hub)
