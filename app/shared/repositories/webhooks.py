"""Webhooks of tenants, and what is sent to them. `lifecycle` queues a delivery in the transaction that ends a job."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import WebhookNotFoundError
from app.shared.models import Webhook, WebhookDelivery
from app.shared.repositories.identifiers import new_id

PREFIX = "hook"
TEST_EVENT = "webhook.test"
"""The event of a delivery that a user asks for, to see whether deliveries arrive."""
MOST_ATTEMPTS = 8
"""Attempts at a delivery before it is given up, within about a day."""

_FIRST_WAIT = timedelta(seconds=30)
_LONGEST_WAIT = timedelta(hours=12)
# After this, another worker sends what one that has died was sending.
_ATTEMPT = timedelta(minutes=2)
_MAX_ERROR = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class DueDelivery:
    """A delivery that this process is to attempt now.

    Attributes:
        id: its id, the same in every attempt.
        url: where to.
        secret: key of the signature, encrypted.
        body: what to send.
    """

    id: str
    url: str
    secret: str
    body: dict[str, Any]


def create_webhook(session: Session, owner: str, url: str, events: Sequence[str], secret: str) -> Webhook:
    """Create a webhook; `secret` is encrypted."""
    at = now(session)
    row = Webhook(id=new_id(PREFIX, at), owner=owner, url=url, events=" ".join(events), secret=secret, created_at=at)
    session.add(row)
    session.flush()
    return row


def get_webhook(session: Session, owner: str, webhook_id: str) -> Webhook:
    """Return a webhook of a tenant.

    Raises:
        WebhookNotFoundError: the webhook does not exist, or belongs to another tenant.
    """
    mine = select(Webhook).where(Webhook.owner == owner, Webhook.id == webhook_id)
    row = session.scalars(mine).one_or_none()
    if row is None:
        raise WebhookNotFoundError("no webhook has this id; GET /webhooks lists yours")
    return row


def list_webhooks(session: Session, owner: str) -> list[Webhook]:
    """Return the webhooks of a tenant, oldest first."""
    return list(session.scalars(select(Webhook).where(Webhook.owner == owner).order_by(Webhook.id)))


def count_webhooks(session: Session, owner: str) -> int:
    """Return the number of a tenant's webhooks."""
    return session.execute(select(func.count()).select_from(Webhook).where(Webhook.owner == owner)).scalar_one()


def list_deliveries(session: Session, webhook_id: str, *, limit: int = 20) -> list[WebhookDelivery]:
    """Return the newest deliveries of a webhook, newest first."""
    mine = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    newest = mine.order_by(WebhookDelivery.created_at.desc(), WebhookDelivery.id).limit(limit)
    return list(session.scalars(newest))


def delete_webhook(session: Session, owner: str, webhook_id: str) -> None:
    """Delete a webhook of a tenant, with what was not sent yet; raises the same errors as `get_webhook`."""
    row = get_webhook(session, owner, webhook_id)
    session.execute(delete(Webhook).where(Webhook.id == row.id), execution_options={"synchronize_session": False})


def queue_test(session: Session, hook: Webhook) -> WebhookDelivery:
    """Queue a delivery that says nothing, or return the one that has not been attempted yet."""
    waiting = (
        select(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == hook.id, WebhookDelivery.event == TEST_EVENT)
        .where(WebhookDelivery.available_at.is_not(None))
        .limit(1)
    )
    row = session.scalars(waiting).one_or_none()
    if row is None:
        at = now(session)
        row = WebhookDelivery(
            id=f"dlv_{secrets.token_hex(16)}",
            webhook_id=hook.id,
            event=TEST_EVENT,
            body={"type": TEST_EVENT, "timestamp": at.isoformat(), "data": {"webhook_id": hook.id}},
            created_at=at,
            available_at=at,
        )
        session.add(row)
        session.flush()
    return row


def is_delivery_due(session: Session) -> bool:
    """Return whether a delivery is due, without a lock."""
    due = select(WebhookDelivery.id).where(WebhookDelivery.available_at <= now(session))
    return session.execute(due.limit(1)).first() is not None


def claim_delivery(session: Session) -> DueDelivery | None:
    """Return a delivery that is due, which no other process attempts for the next minutes; None if nothing is due."""
    at = now(session)
    due = (
        select(WebhookDelivery)
        .where(WebhookDelivery.available_at <= at)
        .order_by(WebhookDelivery.available_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = session.scalars(due).one_or_none()
    if row is None:
        return None
    hook = session.get_one(Webhook, row.webhook_id)
    row.attempt += 1
    row.available_at = at + _ATTEMPT
    session.flush()
    return DueDelivery(id=row.id, url=hook.url, secret=hook.secret, body=row.body)


def finish_delivery(session: Session, delivery_id: str, error: str | None) -> None:
    """Record the outcome of an attempt: delivered, to be repeated later, or given up.

    Args:
        session: a writing transaction.
        delivery_id: the delivery; no-op if it was deleted with its webhook.
        error: why it failed; None if the receiver accepted it.
    """
    row = session.get(WebhookDelivery, delivery_id, with_for_update=True)
    if row is None:
        return
    at = now(session)
    row.error = None if error is None else error[:_MAX_ERROR]
    if error is None:
        row.delivered_at, row.available_at = at, None
    elif row.attempt >= MOST_ATTEMPTS or row.event == TEST_EVENT:
        row.available_at = None
    else:
        row.available_at = at + min(_FIRST_WAIT * 4 ** (row.attempt - 1), _LONGEST_WAIT)
    session.flush()


def forget_deliveries(session: Session, *, retention: timedelta) -> None:
    """Delete deliveries that were made or given up long ago."""
    is_old = WebhookDelivery.created_at <= now(session) - retention
    is_over = or_(WebhookDelivery.delivered_at.is_not(None), WebhookDelivery.available_at.is_(None))
    session.execute(delete(WebhookDelivery).where(is_old, is_over), execution_options={"synchronize_session": False})
