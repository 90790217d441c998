"""Files of the service: artifacts and uploads in a store, checkpoints in work folders.

<data-dir>/                       a local store's folder, unless ROCKET_STORAGE_URL names another
├── rocket.sqlite3                the database, unless it is elsewhere
├── lock                          held by the running service
├── database                      names the database whose files these are
├── artifacts/<key>               one file per artifact and upload, never altered
├── profiles/<fingerprint>/       what later jobs on the same model need not calibrate again
└── work/<key>/                   a job's checkpoints and exports in the making

s3://BUCKET/PREFIX/database and s3://BUCKET/PREFIX/artifacts/<key> are the same elsewhere.

Keys are 32 random hexadecimal digits. Names that a user chose are looked up in the database and never become a path.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.shared.errors import InvalidSettingsError
from app.shared.settings import Settings
from app.shared.storage.folders import WorkFolders, data_folder_lock, is_bound_to
from app.shared.storage.local import LocalStore
from app.shared.storage.store import ArtifactStore, StoredFile

__all__ = [
    "ArtifactStore",
    "LocalStore",
    "StoredFile",
    "WorkFolders",
    "data_folder_lock",
    "is_bound_to",
    "open_store",
]


def open_store(settings: Settings) -> ArtifactStore:
    """The store that the settings name; one that does not answer at the moment can be opened all the same.

    Raises:
        InvalidSettingsError: what it needs is not installed.
        StorageError: its folder, or what the AWS tools are configured with, cannot be used.
    """
    if settings.storage_url is None:
        return LocalStore(settings.data_dir)
    url = urlsplit(settings.storage_url)
    if url.scheme == "file":
        return LocalStore(Path(unquote(url.path)))
    try:
        # Not part of the base install.
        from app.shared.storage.s3 import S3Store
    except ModuleNotFoundError as error:
        raise InvalidSettingsError(
            f"ROCKET_STORAGE_URL names an S3 store, for which {error.name} is missing: "
            "pip install 'rocket-compress[s3]'"
        ) from error
    return S3Store(url.netloc, url.path, endpoint_url=settings.s3_endpoint_url)
