"""Encryption of users' secrets in the database, with a key that is stored elsewhere."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from pydantic import SecretStr

from app.shared.errors import DiskFullError, InvalidSettingsError, StorageError, is_disk_full
from app.shared.settings import Settings
from rocket_core.system.files import sync_folder

KEY_FILE = "secret.key"


def encrypt(settings: Settings, secret: SecretStr) -> str:
    """Return a secret in encrypted form, for the database.

    Raises:
        DiskFullError: no key exists, and the disk of the data folder has no room for one.
        StorageError: no key exists, and none can be written to the data folder.
    """
    return Fernet(_key(settings)).encrypt(secret.get_secret_value().encode()).decode()


def decrypt(settings: Settings, stored: str) -> SecretStr:
    """Return a secret that `encrypt` has encrypted.

    Raises:
        InvalidSettingsError: it was encrypted with another key.
        StorageError: the key cannot be read.
    """
    try:
        return SecretStr(Fernet(_key(settings)).decrypt(stored.encode()).decode())
    except InvalidToken:
        raise InvalidSettingsError(
            "a secret in the database, a job's Hub token or a webhook's key, cannot be read: ROCKET_SECRET_KEY, or the "
            "file secret.key in the data folder, must be the same for the API and all workers"
        ) from None


def _key(settings: Settings) -> bytes:
    if settings.secret_key is not None:
        return settings.secret_key.get_secret_value().encode()
    file = settings.data_dir / KEY_FILE
    try:
        with suppress(FileNotFoundError):
            return file.read_bytes()
        return _create_key(file)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(f"no space left for {file}; free some space and retry") from error
        raise StorageError(f"cannot use {file}: {error.strerror or error}; set ROCKET_SECRET_KEY instead") from error


def _create_key(file: Path) -> bytes:
    """Create a key unless another process has just done so; the file appears atomically and never changes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(Fernet.generate_key())
            stream.flush()
            os.fsync(stream.fileno())
        # Unlike a rename, a link does not replace an existing file.
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)
    return file.read_bytes()
