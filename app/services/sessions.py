"""Signing in to the pages: a cookie that names a key, and what proves that a form is ours.

The cookie is encrypted, says when it ends, and is worth no more than its key: whoever revokes the key ends the session.
Nothing of it is kept here, so that any replica with the same ROCKET_SECRET_KEY reads it.
"""

import secrets
import time

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from app.shared.encryption import decrypt, encrypt
from app.shared.errors import InvalidSettingsError
from app.shared.settings import Settings

SESSION_SECONDS = 12 * 3600


class OpenedSession(BaseModel):
    """What the cookie holds.

    Attributes:
        key_id: the key that was given.
        csrf: what the forms of this session hold.
        ends_at: seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key_id: str
    csrf: str
    ends_at: float


def open_session(settings: Settings, key_id: str) -> str:
    """The cookie of somebody who has given a valid key.

    Raises:
        StorageError: there is nothing to encrypt it with.
    """
    opened = OpenedSession(key_id=key_id, csrf=secrets.token_urlsafe(24), ends_at=time.time() + SESSION_SECONDS)
    return encrypt(settings, SecretStr(opened.model_dump_json()))


def read_session(settings: Settings, token: str) -> OpenedSession | None:
    """What a cookie holds; None if it is none of ours, or has ended."""
    try:
        opened = OpenedSession.model_validate_json(decrypt(settings, token).get_secret_value())
    except (InvalidSettingsError, ValidationError, UnicodeEncodeError):
        return None
    return opened if time.time() < opened.ends_at else None
