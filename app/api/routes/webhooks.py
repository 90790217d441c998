"""`/webhooks`: addresses that the ends of the caller's jobs are reported to."""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response, status

from app.api.dependencies import JSON_BODY, ActorDep, ContextDep, OwnerDep
from app.api.json_bodies import JsonRoute
from app.api.problems import problems
from app.api.resources import DeliveryView, NewWebhookView, WebhookDetailsView, WebhookList
from app.api.serializers import delivery_view, webhook_view
from app.services import webhooks
from app.shared.errors import WebhookNotFoundError
from app.shared.resource_requests import WebhookRequest

PATH = "/webhooks"

router = APIRouter(prefix=PATH, tags=["webhooks"], route_class=JsonRoute)

_ID = re.compile(r"hook_[0-9a-z]{26}")


def _webhook_id(webhook_id: Annotated[str, Path(description="id of a webhook")]) -> str:
    if not _ID.fullmatch(webhook_id):
        raise WebhookNotFoundError("no webhook has this id; GET /webhooks lists yours")
    return webhook_id


WebhookId = Annotated[str, Depends(_webhook_id)]


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    dependencies=[JSON_BODY],
    responses=problems(400, 413, 415, 422, 429, 507),
)
def create_webhook(body: WebhookRequest, response: Response, context: ContextDep, actor: ActorDep) -> NewWebhookView:
    """Create a webhook, and return the secret that its deliveries are signed with; it is shown only once."""
    row, secret = webhooks.create_webhook(context, actor, body)
    response.headers["Location"] = f"{PATH}/{row.id}"
    return NewWebhookView(**webhook_view(row).model_dump(), secret=secret)


@router.get("", responses=problems())
def list_webhooks(context: ContextDep, owner: OwnerDep) -> WebhookList:
    """List the caller's webhooks, oldest first."""
    return WebhookList(data=[webhook_view(row) for row in webhooks.list_webhooks(context, owner)])


@router.get("/{webhook_id}", responses=problems(404))
def get_webhook(webhook_id: WebhookId, context: ContextDep, owner: OwnerDep) -> WebhookDetailsView:
    """Return a webhook, and its newest deliveries."""
    row, deliveries = webhooks.get_webhook(context, owner, webhook_id)
    return WebhookDetailsView(
        **webhook_view(row).model_dump(), deliveries=tuple(delivery_view(each) for each in deliveries)
    )


@router.post("/{webhook_id}/test", status_code=status.HTTP_202_ACCEPTED, responses=problems(404, 507))
def test_webhook(webhook_id: WebhookId, context: ContextDep, actor: ActorDep) -> DeliveryView:
    """Send a test delivery, of the event `webhook.test`, which is attempted once.

    A worker sends it; the newest deliveries of the webhook show the outcome. While one waits, it is returned again.
    """
    return delivery_view(webhooks.test_webhook(context, actor, webhook_id))


@router.delete("/{webhook_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404))
def delete_webhook(webhook_id: WebhookId, context: ContextDep, actor: ActorDep) -> None:
    """Delete a webhook, with what was not sent yet."""
    webhooks.delete_webhook(context, actor, webhook_id)
