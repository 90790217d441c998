"""Sessions of users signed in to the pages. Only a token's id and a hash of its secret are stored."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import NotFoundError
from app.shared.models import ApiKey, BrowserSession
from app.shared.repositories.keys import find_usable
from app.shared.repositories.tokens import Tokens

_TOKENS = Tokens("rs")
_MAX_PER_KEY = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSession:
    """A newly opened session.

    Attributes:
        row: its row.
        token: the token for the client, which cannot be shown again.
    """

    row: BrowserSession
    token: str


def open_session(session: Session, key_id: str, *, lifetime: timedelta) -> NewSession:
    """Open a session for a key; if the key has more than a hundred, the oldest end."""
    at = now(session)
    mine = select(BrowserSession.id).where(BrowserSession.key_id == key_id)
    newest = mine.order_by(BrowserSession.created_at.desc(), BrowserSession.id).offset(_MAX_PER_KEY - 1)
    surplus = session.scalars(newest).all()
    session.execute(delete(BrowserSession).where(BrowserSession.id.in_(surplus)))
    token = _TOKENS.make()
    row = BrowserSession(
        id=token.id, key_id=key_id, secret_sha256=token.secret_sha256, created_at=at, expires_at=at + lifetime
    )
    session.add(row)
    session.flush()
    return NewSession(row=row, token=token.text)


def find_session(session: Session, token: str) -> tuple[BrowserSession, ApiKey] | None:
    """Return the session of a token and its key; None if the session has ended or the key is not usable."""
    parsed = _TOKENS.parse(token)
    row = None if parsed is None else session.get(BrowserSession, parsed.id)
    if parsed is None or row is None or not parsed.is_of(row.secret_sha256):
        return None
    key = find_usable(session, row.key_id) if row.expires_at > now(session) else None
    return None if key is None else (row, key)


def list_sessions(session: Session, tenant: str | None = None) -> list[tuple[BrowserSession, ApiKey]]:
    """Return the sessions of a tenant, or all, oldest first; expired ones are included until they are swept."""
    statement = select(BrowserSession, ApiKey).join(ApiKey, ApiKey.id == BrowserSession.key_id)
    if tenant is not None:
        statement = statement.where(ApiKey.tenant == tenant)
    ordered = statement.order_by(BrowserSession.created_at, BrowserSession.id)
    return [(row, key) for row, key in session.execute(ordered)]


def end_session(session: Session, session_id: str) -> bool:
    """End a session; return whether it existed."""
    ended = delete(BrowserSession).where(BrowserSession.id == session_id).returning(BrowserSession.id)
    return session.execute(ended).one_or_none() is not None


def revoke_session(session: Session, session_id: str) -> ApiKey:
    """End a session, and return its key.

    Raises:
        NotFoundError: the session does not exist.
    """
    row = session.get(BrowserSession, session_id)
    key = None if row is None else session.get(ApiKey, row.key_id)
    if key is None or not end_session(session, session_id):
        raise NotFoundError("no session has this id; `rocket admin sessions list` shows them")
    return key


def forget_sessions(session: Session) -> None:
    """Delete expired sessions, and those of revoked or expired keys."""
    at = now(session)
    unusable = select(ApiKey.id).where(or_(ApiKey.revoked_at.is_not(None), ApiKey.expires_at <= at))
    ended = or_(BrowserSession.expires_at <= at, BrowserSession.key_id.in_(unusable))
    session.execute(delete(BrowserSession).where(ended))
