"""The life cycle of a job: its statuses, the moves between them, and the one function that makes a move.

queued ──> running ──> succeeded | failed
  │  ^        │ │
  │  └────────┘ └────> cancelling ──> cancelled
  └─────────────────────────────────────^

A running job returns to queued when its worker releases it or dies. Succeeded, failed and cancelled are final.
"""

import secrets
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from app.shared.database import change_rows
from app.shared.models import Job, Webhook, WebhookDelivery


class Status(StrEnum):
    """The status of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the status is final."""
        return not MOVES[self]

    @property
    def is_held(self) -> bool:
        """Whether a worker holds the job."""
        return self in {Status.RUNNING, Status.CANCELLING}


MOVES: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.CANCELLED}),
    Status.RUNNING: frozenset({Status.QUEUED, Status.CANCELLING, Status.SUCCEEDED, Status.FAILED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}


def move(
    session: Session, job_id: str, target: Status, *conditions: ColumnElement[bool], at: datetime, **changes: Any
) -> bool:
    """Move a job to a status if `MOVES` allows it from the job's current status.

    One conditional UPDATE, so that of several callers at most one succeeds, on both databases.

    Args:
        session: a writing transaction.
        job_id: the job.
        target: the new status.
        conditions: further conditions on the row, e.g. the fence.
        at: the current time.
        changes: columns to change together with the status.

    Returns:
        Whether the job moved.
    """
    sources = [source for source, targets in MOVES.items() if target in targets]
    values = {"status": target, **changes}
    if not target.is_held:
        values |= {"fence": None, "lease_until": None, "claimed_by": None, "estimated_finish_at": None}
    if target.is_terminal:
        # A token is stored only as long as it may be needed.
        values |= {"finished_at": at, "hub_token": None}
    statement = update(Job).where(Job.id == job_id, Job.status.in_(sources), *conditions).values(values)
    has_moved = change_rows(session, statement) == 1
    if has_moved and target.is_terminal:
        _queue_deliveries(session, job_id, target, at)
    return has_moved


def _queue_deliveries(session: Session, job_id: str, status: Status, at: datetime) -> None:
    """Queue what the webhooks of a job's tenant get to know of its end, in the transaction that ends it."""
    event = f"job.{status}"
    mine = select(Webhook).join(Job, Job.owner == Webhook.owner).where(Job.id == job_id)
    hooks = [hook for hook in session.scalars(mine) if event in hook.events.split()]
    if not hooks:
        return
    ended = select(Job.request, Job.error, Job.result).where(Job.id == job_id)
    request, error, result = session.execute(ended).one()
    data = {
        "id": job_id,
        "status": str(status),
        "model_id": request["model_id"],
        "metadata": request.get("metadata", {}),
        "error": error,
        "result": result,
    }
    body = {"type": event, "timestamp": at.isoformat(), "data": data}
    session.add_all(
        WebhookDelivery(
            id=f"dlv_{secrets.token_hex(16)}",
            webhook_id=hook.id,
            event=event,
            body=body,
            created_at=at,
            available_at=at,
        )
        for hook in hooks
    )
    session.flush()
