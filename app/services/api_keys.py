"""API keys of a tenant, managed by its own users, where the operator allows it."""

from collections.abc import Collection, Sequence
from datetime import timedelta

from sqlalchemy.orm import Session

from app.services.access import Caller
from app.services.context import Context
from app.shared.database import now
from app.shared.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, QuotaExceededError
from app.shared.models import ApiKey
from app.shared.repositories import audit, keys, tenants
from app.shared.repositories.audit import Action, Actor

MOST_KEYS = 100
"""Usable keys of a tenant that users can reach."""


def may_manage(context: Context, caller: Caller) -> bool:
    """Return whether a caller may create and revoke keys of its tenant: only in a session, whose forms have a token."""
    return context.settings.tenants_manage_keys and caller.session_id is not None and "write" in caller.scopes


def list_keys(context: Context, caller: Caller) -> Sequence[ApiKey]:
    """Return the keys of a caller's tenant, newest first, including those that were revoked or have expired."""
    with context.database.snapshot() as session:
        return list(reversed(keys.list_keys(session, caller.tenant)))


def create_key(
    context: Context, caller: Caller, actor: Actor, *, label: str, scopes: Collection[str], days: int | None
) -> str:
    """Create a key of a caller's tenant, with no more rights than the caller's own, and return it.

    Raises:
        PermissionDeniedError: the caller may not manage keys, or lacks one of the scopes, or its key was just revoked.
        InvalidRequestError: the label or the lifetime is not valid, or no scope is chosen.
        QuotaExceededError: the tenant has as many keys as allowed.
    """
    _check(context, caller)
    if not set(scopes) <= caller.scopes:
        raise PermissionDeniedError("a key gets no scope that your own lacks")
    if days is not None and not 1 <= days <= 3650:
        raise InvalidRequestError("a key is valid for 1 to 3650 days, or without a limit", param="days")
    with context.database.transaction() as session:
        tenants.lock_tenant(session, caller.tenant)
        if len([row for row in keys.list_keys(session, caller.tenant) if row.revoked_at is None]) >= MOST_KEYS:
            raise QuotaExceededError(f"a tenant may have at most {MOST_KEYS} keys here; revoke one first")
        lifetime = None if days is None else timedelta(days=days)
        _check_lifetime(session, caller, lifetime)
        made = keys.create_key(
            session, caller.tenant, scopes=scopes, label=label, lifetime=lifetime, made_with=caller.key_id
        )
        detail = {"scopes": made.row.scopes, "days": days}
        audit.record(session, actor, Action.KEY_CREATE, subject=made.row.id, detail=detail)
    return made.text


def revoke_key(context: Context, caller: Caller, actor: Actor, key_id: str) -> None:
    """Revoke a key of a caller's tenant; its sessions, and the keys made with it, end with it.

    Raises:
        PermissionDeniedError: the caller may not manage keys.
        NotFoundError: the tenant has no such key.
    """
    _check(context, caller)
    with context.database.transaction() as session:
        if key_id not in {row.id for row in keys.list_keys(session, caller.tenant)}:
            raise NotFoundError("no key has this id; reload the page")
        keys.revoke_key(session, key_id)
        audit.record(session, actor, Action.KEY_REVOKE, subject=key_id)


def _check_lifetime(session: Session, caller: Caller, lifetime: timedelta | None) -> None:
    """Refuse a key that would outlive the one that it is made with."""
    own = keys.find_usable(session, caller.key_id or "")
    if own is None:
        raise PermissionDeniedError("your own key was revoked or has expired; sign in with another")
    ends = own.expires_at
    if ends is None:
        return
    left = ends - now(session)
    if lifetime is None or lifetime > left:
        raise InvalidRequestError(
            f"your own key expires in {left.days} days, and a key made with it no later; ask the operator for another",
            param="days",
        )


def _check(context: Context, caller: Caller) -> None:
    if not may_manage(context, caller):
        raise PermissionDeniedError(
            "you may not manage API keys here; ask the operator, who creates them with `rocket admin keys create`"
        )
