"""Tokens `PREFIX_<id>_<secret>`, of which only the id and a hash of the secret are stored.

A plain SHA-256 is enough: a secret of 256 random bits cannot be guessed, so a slow hash would add no protection.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

_ID_BYTES = 8
_SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token.

    Attributes:
        id: id of its row.
        text: the whole token.
        secret_sha256: hash of its secret, hexadecimal.
    """

    id: str
    text: str
    secret_sha256: str

    def is_of(self, secret_sha256: str) -> bool:
        """Return whether a row stores the hash of its secret."""
        return hmac.compare_digest(self.secret_sha256, secret_sha256)


class Tokens:
    """Tokens of one kind.

    Args:
        prefix: what they begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._form = re.compile(rf"{prefix}_([0-9a-f]{{{2 * _ID_BYTES}}})_([0-9a-f]{{{2 * _SECRET_BYTES}}})")

    def make(self) -> Token:
        """Return a new token."""
        token = self.parse(f"{self._prefix}_{secrets.token_hex(_ID_BYTES)}_{secrets.token_hex(_SECRET_BYTES)}")
        assert token is not None
        return token

    def parse(self, text: str) -> Token | None:
        """Return a token from its text; None if that has another form."""
        parts = self._form.fullmatch(text)
        if parts is None:
            return None
        return Token(id=parts[1], text=text, secret_sha256=hashlib.sha256(parts[2].encode()).hexdigest())
