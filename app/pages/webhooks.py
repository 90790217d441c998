"""`/ui/webhooks`: addresses that the ends of a tenant's jobs are reported to."""

from http import HTTPStatus
from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from app.api.dependencies import ActorDep, ContextDep, OwnerDep
from app.api.paths import PAGES
from app.api.routes.webhooks import WebhookId
from app.pages.forms import FORM, FieldsDep
from app.pages.rendering import redirect, render
from app.services import webhooks
from app.services.context import Context
from app.shared.errors import InvalidRequestError, QuotaExceededError
from app.shared.models import Webhook
from app.shared.resource_requests import WebhookEvent, WebhookRequest

router = APIRouter(include_in_schema=False)

WEBHOOKS = f"{PAGES}/webhooks"


@router.get(WEBHOOKS)
def show_webhooks(request: Request, context: ContextDep, owner: OwnerDep) -> Response:
    """Show all webhooks with their newest deliveries, without their secrets."""
    return _show(request, context, owner)


@router.get(f"{WEBHOOKS}/{{webhook_id}}/deliveries")
def show_deliveries(request: Request, webhook_id: WebhookId, context: ContextDep, owner: OwnerDep) -> Response:
    """Show the newest deliveries of a webhook only."""
    hook, deliveries = webhooks.get_webhook(context, owner, webhook_id)
    return render(request, "webhook_deliveries.html.j2", hook=hook, deliveries=deliveries)


@router.post(WEBHOOKS)
def create_webhook(request: Request, context: ContextDep, actor: ActorDep, fields: FieldsDep) -> Response:
    """Create a webhook, and show its secret; it cannot be shown again."""
    url = fields.get("url", "").strip()
    events = [event for event in get_args(WebhookEvent) if fields.get(event)]
    try:
        if not events:
            raise InvalidRequestError("choose at least one event", param="events")
        hook, secret = webhooks.create_webhook(context, actor, WebhookRequest(url=url, events=tuple(events)))
    except ValidationError:
        return _show(request, context, actor.tenant, url=url, problem="Write the address, https://HOST/PATH.")
    except (InvalidRequestError, QuotaExceededError) as error:
        return _show(request, context, actor.tenant, url=url, problem=str(error))
    return _show(request, context, actor.tenant, made=(hook, secret))


@router.post(f"{WEBHOOKS}/{{webhook_id}}/test", dependencies=[FORM])
def send_test(request: Request, webhook_id: WebhookId, context: ContextDep, actor: ActorDep) -> Response:
    """Send a test delivery, and show all webhooks."""
    webhooks.test_webhook(context, actor, webhook_id)
    return redirect(request, f"{WEBHOOKS}#{webhook_id}")


@router.post(f"{WEBHOOKS}/{{webhook_id}}/delete", dependencies=[FORM])
def delete_webhook(request: Request, webhook_id: WebhookId, context: ContextDep, actor: ActorDep) -> Response:
    """Delete a webhook, and show the others."""
    webhooks.delete_webhook(context, actor, webhook_id)
    return redirect(request, WEBHOOKS)


def _show(
    request: Request,
    context: Context,
    owner: str,
    *,
    url: str = "",
    problem: str | None = None,
    made: tuple[Webhook, str] | None = None,
) -> Response:
    found = [webhooks.get_webhook(context, owner, hook.id) for hook in webhooks.list_webhooks(context, owner)]
    return render(
        request,
        "webhooks.html.j2",
        HTTPStatus.OK if problem is None else HTTPStatus.UNPROCESSABLE_ENTITY,
        hooks=found,
        events=get_args(WebhookEvent),
        url=url,
        problem=problem,
        made=made,
        allows_private=context.settings.webhooks_allow_private,
    )
