"""Webhooks of tenants: created, listed, deleted. A worker sends them (`worker.webhooks`)."""

import base64
import secrets
from collections.abc import Sequence

from pydantic import SecretStr

from app.services.context import Context
from app.shared.encryption import encrypt
from app.shared.errors import QuotaExceededError
from app.shared.models import Webhook, WebhookDelivery
from app.shared.repositories import audit, tenants, webhooks
from app.shared.repositories.audit import Action, Actor
from app.shared.resource_requests import WebhookRequest
from app.shared.webhook_addresses import parse_destination

_SECRET_BYTES = 32


def create_webhook(context: Context, actor: Actor, request: WebhookRequest) -> tuple[Webhook, str]:
    """Create a webhook.

    Returns:
        The webhook, and its secret, which cannot be shown again.

    Raises:
        InvalidRequestError: the URL is not one that a webhook may have.
        QuotaExceededError: the tenant has as many webhooks as allowed.
        StorageError: the secret cannot be encrypted.
    """
    parse_destination(request.url, allow_private=context.settings.webhooks_allow_private)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()
    encrypted = encrypt(context.settings, SecretStr(secret))
    most = context.settings.max_webhooks
    with context.database.transaction() as session:
        tenants.lock_tenant(session, actor.tenant)
        if webhooks.count_webhooks(session, actor.tenant) >= most:
            raise QuotaExceededError(f"a tenant may have at most {most} webhooks; delete one first")
        row = webhooks.create_webhook(session, actor.tenant, request.url, request.events, encrypted)
        audit.record(session, actor, Action.WEBHOOK_CREATE, subject=row.id)
    return row, secret


def list_webhooks(context: Context, owner: str) -> Sequence[Webhook]:
    """Return the webhooks of a tenant, oldest first."""
    with context.database.snapshot() as session:
        return webhooks.list_webhooks(session, owner)


def get_webhook(context: Context, owner: str, webhook_id: str) -> tuple[Webhook, Sequence[WebhookDelivery]]:
    """Return a webhook of a tenant, and its newest deliveries.

    Raises:
        WebhookNotFoundError: the webhook does not exist, or belongs to another tenant.
    """
    with context.database.snapshot() as session:
        row = webhooks.get_webhook(session, owner, webhook_id)
        return row, webhooks.list_deliveries(session, row.id)


def test_webhook(context: Context, actor: Actor, webhook_id: str) -> WebhookDelivery:
    """Queue a test delivery to a webhook, which a worker attempts once.

    Raises:
        WebhookNotFoundError: the webhook does not exist, or belongs to another tenant.
    """
    with context.database.transaction() as session:
        tenants.lock_tenant(session, actor.tenant)
        return webhooks.queue_test(session, webhooks.get_webhook(session, actor.tenant, webhook_id))


def delete_webhook(context: Context, actor: Actor, webhook_id: str) -> None:
    """Delete a webhook of a tenant, with what was not sent yet.

    Raises:
        WebhookNotFoundError: the webhook does not exist, or belongs to another tenant.
    """
    with context.database.transaction() as session:
        webhooks.delete_webhook(session, actor.tenant, webhook_id)
        audit.record(session, actor, Action.WEBHOOK_DELETE, subject=webhook_id)
