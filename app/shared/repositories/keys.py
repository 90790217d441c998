"""API keys: created, shown once, used, revoked. Only a key's id and a hash of its secret are stored."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, get_args

from sqlalchemy import ColumnElement, and_, exists, or_, select, update
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import InvalidRequestError, NotFoundError
from app.shared.models import ApiKey
from app.shared.repositories.tenants import ensure_tenant, lock_tenant
from app.shared.repositories.tokens import Tokens

Scope = Literal["read", "write", "metrics"]
"""What a key may be used for: reading, changing, and the metrics of the whole service."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("read", "write")

_TOKENS = Tokens("rk")
_MAX_LABEL = 64
_USE_PRECISION = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """A newly created key.

    Attributes:
        row: its row.
        text: the key itself, which cannot be shown again.
        is_new_tenant: whether its tenant was created with it.
    """

    row: ApiKey
    text: str
    is_new_tenant: bool


def create_key(
    session: Session,
    tenant: str,
    *,
    scopes: Collection[str] = DEFAULT_SCOPES,
    label: str = "",
    lifetime: timedelta | None = None,
    made_with: str | None = None,
) -> NewKey:
    """Create a key, and its tenant if needed.

    Args:
        session: a writing transaction.
        tenant: the tenant.
        scopes: what it may be used for.
        label: its owner's name for it.
        lifetime: time until it expires; None for no limit.
        made_with: id of the key that its creator uses, with which it is revoked.

    Raises:
        InvalidRequestError: the name or label is not valid, or scopes are missing or unknown.
    """
    if not scopes or not set(scopes) <= set(SCOPES):
        raise InvalidRequestError(f"a key needs at least one scope, of {', '.join(SCOPES)}", param="scope")
    if len(label) > _MAX_LABEL or not label.isprintable():
        raise InvalidRequestError(f"a label must be one line of at most {_MAX_LABEL} characters", param="label")
    is_new = ensure_tenant(session, tenant)
    at = now(session)
    token = _TOKENS.make()
    row = ApiKey(
        id=token.id,
        tenant=tenant,
        label=label,
        secret_sha256=token.secret_sha256,
        scopes=" ".join(scope for scope in SCOPES if scope in scopes),
        created_at=at,
        expires_at=None if lifetime is None else at + lifetime,
        made_with=made_with,
    )
    session.add(row)
    session.flush()
    return NewKey(row=row, text=token.text, is_new_tenant=is_new)


def find_key(session: Session, text: str) -> ApiKey | None:
    """Return the row of a key, if it is currently valid."""
    token = _TOKENS.parse(text)
    row = None if token is None else find_usable(session, token.id)
    return row if token is not None and row is not None and token.is_of(row.secret_sha256) else None


def find_named(session: Session, text: str) -> ApiKey | None:
    """Return the row that a key names, whether the key is valid or not."""
    token = _TOKENS.parse(text)
    return None if token is None else session.get(ApiKey, token.id)


def find_usable(session: Session, key_id: str) -> ApiKey | None:
    """Return the key with an id, unless it was revoked or has expired."""
    return session.scalars(select(ApiKey).where(ApiKey.id == key_id, _is_usable(now(session)))).one_or_none()


def has_keys(session: Session) -> bool:
    """Return whether a key was ever created, including those that were revoked or have expired."""
    return session.execute(select(exists(select(ApiKey.id)))).scalar_one()


def has_usable_keys(session: Session) -> bool:
    """Return whether any key is currently valid."""
    return session.execute(select(exists().where(_is_usable(now(session))))).scalar_one()


def is_use_due(session: Session, row: ApiKey) -> bool:
    """Return whether the last recorded use is too old to be kept."""
    return row.last_used_at is None or row.last_used_at <= now(session) - _USE_PRECISION


def note_use(session: Session, key_id: str) -> None:
    """Record a use of a key, at most once a minute, so that not every read causes a write."""
    at = now(session)
    is_due = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= at - _USE_PRECISION)
    statement = update(ApiKey).where(ApiKey.id == key_id, is_due).values(last_used_at=at)
    session.execute(statement)


def list_keys(session: Session, tenant: str | None = None) -> list[ApiKey]:
    """Return the keys of a tenant, or of all, oldest first, including those that were revoked or have expired."""
    statement = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
    return list(session.scalars(statement if tenant is None else statement.where(ApiKey.tenant == tenant)))


def revoke_key(session: Session, key_id: str) -> ApiKey:
    """Revoke a key immediately, with all keys that were made with it, or with those; idempotent.

    Whoever stole a key could otherwise keep another one.

    Raises:
        NotFoundError: the key does not exist.
    """
    row = session.get(ApiKey, key_id)
    if row is None:
        raise NotFoundError("no key has this id; `rocket admin keys list` shows them")
    # A key that is being made with it is made first, or not at all.
    lock_tenant(session, row.tenant)
    ended = select(ApiKey.id).where(ApiKey.id == key_id).cte(recursive=True)
    ended = ended.union(select(ApiKey.id).join(ended, ApiKey.made_with == ended.c.id))
    usable = ApiKey.id.in_(select(ended.c.id)), ApiKey.revoked_at.is_(None)
    session.execute(update(ApiKey).where(*usable).values(revoked_at=now(session)))
    session.refresh(row)
    return row


def _is_usable(at: datetime) -> ColumnElement[bool]:
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > at))
