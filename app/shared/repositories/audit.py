"""The audit log: who did what, from where. It is append-only; the database refuses to change or delete rows."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.models import LOCAL_OWNER, AuditEvent

Outcome = Literal["success", "failure"]


class Action(StrEnum):
    """The recorded actions."""

    JOB_SUBMIT = "job.submit"
    JOB_CANCEL = "job.cancel"
    JOB_RETRY = "job.retry"
    JOB_DELETE = "job.delete"
    JOB_REQUEUE = "job.requeue"
    UPLOAD_CREATE = "upload.create"
    UPLOAD_DELETE = "upload.delete"
    MODEL_CREATE = "model.create"
    MODEL_REFUSE = "model.refuse"
    MODEL_COMPLETE = "model.complete"
    MODEL_DELETE = "model.delete"
    WEBHOOK_CREATE = "webhook.create"
    WEBHOOK_DELETE = "webhook.delete"
    LINK_CREATE = "link.create"
    LINK_DELETE = "link.delete"
    PROFILE_CREATE = "profile.create"
    PROFILE_DELETE = "profile.delete"
    SIGN_IN = "session.sign_in"
    SIGN_OUT = "session.sign_out"
    SESSION_REVOKE = "session.revoke"
    KEY_CREATE = "key.create"
    KEY_REVOKE = "key.revoke"
    QUOTA_SET = "quota.set"


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The originator of an action, on whose behalf and from where.

    Attributes:
        tenant: the tenant; "" for no particular one.
        name: id of the API key, or one of `local` (a service without keys), `unknown` (not signed in), `worker`,
            `admin`.
        address: IP address of the client; None if the action did not come over the network.
        request_id: id of the request, as in the service's log.
    """

    tenant: str
    name: str
    address: str | None = None
    request_id: str | None = None

    def on_behalf_of(self, tenant: str) -> "Actor":
        """Return the same actor, acting on another tenant's behalf."""
        return replace(self, tenant=tenant)


LOCAL_ACTOR = Actor(tenant=LOCAL_OWNER, name="local")
ADMIN = Actor(tenant="", name="admin")
_MAX_ADDRESS = 64


def record(
    session: Session,
    actor: Actor,
    action: Action,
    *,
    subject: str | None = None,
    outcome: Outcome = "success",
    detail: Mapping[str, str | int | None] = MappingProxyType({}),
) -> None:
    """Record an action, in the transaction that performs it.

    Args:
        session: a writing transaction.
        actor: originator of the action.
        action: the action.
        subject: id of the action's object.
        outcome: whether the action succeeded.
        detail: further details, without secrets and without text that a client chose.
    """
    # Several users may have a shell on the machine.
    account = {"uid": os.getuid()} if actor.name == ADMIN.name else {}
    row = AuditEvent(
        at=now(session),
        tenant=actor.tenant or None,
        actor=actor.name,
        address=None if actor.address is None else actor.address[:_MAX_ADDRESS],
        action=action,
        subject=subject,
        request_id=actor.request_id,
        outcome=outcome,
        detail={**detail, **account},
    )
    session.add(row)
    session.flush()


def list_events(
    session: Session,
    *,
    tenant: str | None = None,
    action: Action | None = None,
    since: datetime | None = None,
    limit: int,
) -> list[AuditEvent]:
    """Return the newest events, newest first.

    Args:
        session: a transaction.
        tenant: only events of this tenant.
        action: only this action.
        since: only events from this time on.
        limit: maximum number of events.
    """
    statement = select(AuditEvent).order_by(AuditEvent.id.desc()).limit(limit)
    if tenant is not None:
        statement = statement.where(AuditEvent.tenant == tenant)
    if action is not None:
        statement = statement.where(AuditEvent.action == action)
    if since is not None:
        statement = statement.where(AuditEvent.at >= since)
    return list(session.scalars(statement))
