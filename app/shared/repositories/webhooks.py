"""Webhooks of tenants, and what is sent to them. `lifecycle` queues a delivery in the transaction that ends a job."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import WebhookNotFoundError
from app.shared.models import Tenant, Webhook, WebhookDelivery
from app.shared.repositories.identifiers import new_id

PREFIX = "hook"
TEST_EVENT = "webhook.test"
"""The event of a delivery that a user asks for, to see whether deliveries arrive."""
MOST_ATTEMPTS = 8
"""Attempts at a delivery before it is given up, within about a day."""

_FIRST_WAIT = timedelta(seconds=30)
_LONGEST_WAIT = timedelta(hours=12)
# A webhook whose deliveries take long to fail rests for 30 s to 8 min, so that it does not use up its tenant's turns.
_MOST_DOUBLINGS = 4
# So few are attempted that others may never be.
_LONGEST_QUEUED = timedelta(days=3)
# After this, another worker sends what one that has died was sending.
_ATTEMPT = timedelta(minutes=1)
_MAX_ERROR = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class DueDelivery:
    """A delivery that this process is to attempt now.

    Attributes:
        id: its id, the same in every attempt.
        webhook_id: its webhook.
        owner: the webhook's tenant.
        until: when the attempt counts as lost.
        url: where to.
        secret: key of the signature, encrypted.
        body: what to send.
    """

    id: str
    webhook_id: str
    owner: str
    until: datetime
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
    session.execute(delete(Webhook).where(Webhook.id == row.id))


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
        # Whoever asks has probably repaired the receiver.
        hook.next_attempt_at = None
        session.flush()
    return row


def is_delivery_due(session: Session) -> bool:
    """Return whether a delivery is due that no other process's attempt precedes, without a lock."""
    return session.execute(_next_turn(now(session))).first() is not None


def claim_delivery(session: Session) -> DueDelivery | None:
    """Return a delivery that is due, of the tenant that has waited longest for its turn; None if nothing is due.

    No process attempts another of this tenant's until the attempt is finished or counts as lost. Within a tenant, its
    webhooks take turns.
    """
    at = now(session)
    found = session.execute(_next_turn(at).with_for_update(of=Tenant, skip_locked=True)).first()
    if found is None:
        return None
    hook, tenant = found
    due = (
        select(WebhookDelivery)
        .where(WebhookDelivery.webhook_id == hook.id, WebhookDelivery.available_at <= at)
        # Somebody waits for the outcome of a test.
        .order_by(WebhookDelivery.event != TEST_EVENT, WebhookDelivery.available_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = session.scalars(due).one_or_none()
    if row is None:
        return None
    row.attempt += 1
    row.available_at = tenant.next_delivery_at = until = at + _ATTEMPT
    session.flush()
    return DueDelivery(
        id=row.id,
        webhook_id=hook.id,
        owner=tenant.name,
        until=until,
        url=hook.url,
        secret=hook.secret,
        body=row.body,
    )


def _next_turn(at: datetime) -> Select[Webhook, Tenant]:
    is_due = exists().where(WebhookDelivery.webhook_id == Webhook.id, WebhookDelivery.available_at <= at)
    earliest = (Tenant.next_delivery_at, Webhook.next_attempt_at)
    return (
        select(Webhook, Tenant)
        .join(Tenant, Tenant.name == Webhook.owner)
        .where(is_due, *(or_(each.is_(None), each <= at) for each in earliest))
        .order_by(*(each.nulls_first() for each in earliest))
        .limit(1)
    )


def finish_delivery(session: Session, due: DueDelivery, error: str | None, *, is_slow: bool = False) -> None:
    """Record the outcome of an attempt: delivered, to be repeated later, or given up.

    Args:
        session: a writing transaction.
        due: the delivery; no-op if its attempt counts as lost and another one was made, or it was deleted meanwhile.
        error: why it failed; None if the receiver accepted it.
        is_slow: whether it took long to fail; the webhook then rests.
    """
    tenant = session.get(Tenant, due.owner, with_for_update=True)
    if tenant is None or tenant.next_delivery_at != due.until:
        return
    tenant.next_delivery_at = at = now(session)
    hook = session.get(Webhook, due.webhook_id, with_for_update=True)
    row = session.get(WebhookDelivery, due.id, with_for_update=True)
    if hook is not None and row is not None:
        rest = _FIRST_WAIT * 2 ** min(hook.slow_failures, _MOST_DOUBLINGS) if is_slow else timedelta(0)
        hook.next_attempt_at = at + rest
        hook.slow_failures = hook.slow_failures + 1 if is_slow else 0
        row.error = None if error is None else error[:_MAX_ERROR]
        if error is None:
            row.delivered_at, row.available_at = at, None
        elif row.attempt >= MOST_ATTEMPTS or row.event == TEST_EVENT:
            row.available_at = None
        else:
            row.available_at = at + min(_FIRST_WAIT * 4 ** (row.attempt - 1), _LONGEST_WAIT)
    session.flush()


def forget_deliveries(session: Session, *, retention: timedelta) -> None:
    """Give up what has waited too long for webhooks that rest, and delete what was made or given up long ago."""
    at = now(session)
    resting = select(Webhook.id).where(Webhook.slow_failures > 0)
    given_up = (
        update(WebhookDelivery)
        .where(WebhookDelivery.webhook_id.in_(resting), WebhookDelivery.available_at.is_not(None))
        .where(WebhookDelivery.created_at <= at - _LONGEST_QUEUED)
        .values(available_at=None, error=func.coalesce(WebhookDelivery.error, "earlier deliveries took too long"))
    )
    session.execute(given_up)
    is_old = WebhookDelivery.created_at <= at - retention
    is_over = or_(WebhookDelivery.delivered_at.is_not(None), WebhookDelivery.available_at.is_(None))
    session.execute(delete(WebhookDelivery).where(is_old, is_over))
