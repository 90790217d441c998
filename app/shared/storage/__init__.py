"""Files of the service: artifacts and uploads in a store, checkpoints in work folders.

<data-dir>/                       folder of a local store, unless ROCKET_STORAGE_URL names another
├── rocket.sqlite3                the database, unless ROCKET_DATABASE_URL names another
├── lock                          held by the running service
├── database                      id of the database that these files belong to
├── artifacts/<key>               one file per artifact and upload, never changed
├── profiles/<fingerprint>/       profiles and statistics that spare later jobs on the same model the calibration
└── work/<key>/                   checkpoints and unfinished exports of a job

s3://BUCKET/PREFIX/database and s3://BUCKET/PREFIX/artifacts/<key> are their equivalents in a bucket.

Keys are 32 random hexadecimal digits. Names chosen by users are looked up in the database and never become a path.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.shared.errors import InvalidSettingsError
from app.shared.settings import Settings
from app.shared.storage.folders import WorkFolders, data_folder_lock, is_bound_to
from app.shared.storage.local import LocalStore
from app.shared.storage.store import ArtifactStore, StoredFile

__all__ = ["ArtifactStore", "LocalStore", "StoredFile", "WorkFolders", "data_folder_lock", "is_bound_to", "open_store"]


def open_store(settings: Settings) -> ArtifactStore:
    """Return the store that the settings name, even if it does not answer at the moment.

    Raises:
        InvalidSettingsError: a package that it needs is not installed.
        StorageError: its folder, or the AWS configuration, cannot be used.
    """
    if settings.storage_url is None:
        return LocalStore(settings.data_dir)
    url = urlsplit(settings.storage_url)
    if url.scheme == "file":
        return LocalStore(Path(unquote(url.path)))
    try:
        # Not part of the base installation.
        from app.shared.storage.s3 import S3Store
    except ModuleNotFoundError as error:
        raise InvalidSettingsError(
            f"ROCKET_STORAGE_URL names an S3 store, for which {error.name} is missing: "
            "pip install 'rocket-compress[s3]'"
        ) from error
    return S3Store(url.netloc, url.path, endpoint_url=settings.s3_endpoint_url)
