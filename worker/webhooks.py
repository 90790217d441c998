"""Deliveries of webhooks: signed, sent to a checked address, repeated until the receiver accepts them.

The signature is that of Standard Webhooks: HMAC-SHA256 over id, time and body.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import ssl
import threading
import time
from functools import partial

import h11
from anyio import to_thread

from app.shared.database import Database
from app.shared.encryption import decrypt
from app.shared.errors import AppError
from app.shared.repositories import webhooks
from app.shared.repositories.webhooks import DueDelivery
from app.shared.settings import Settings
from app.shared.webhook_addresses import Destination, ForbiddenAddressError, parse_destination

AT_ONCE = 8
"""Number of threads that send, each one tenant's delivery."""

# For the whole delivery: name, connection, TLS, and the answer, however slowly the receiver sends it.
_LONGEST_SECONDS = 10.0
# A failure that takes longer is slow: the webhook rests.
_SLOW_SECONDS = 2.0
_log = logging.getLogger(__name__)


class WebhookSender:
    """Sends what is due; several threads and processes may at once.

    Args:
        settings: settings of the service.
        database: the database.
        stopped: set when the worker stops; what is not sent by then is sent later.
    """

    def __init__(self, settings: Settings, database: Database, stopped: threading.Event) -> None:
        self._settings = settings
        self._database = database
        self._stopped = stopped
        self._looking = threading.Lock()

    def send_due(self) -> None:
        """Attempt deliveries until none is due.

        Raises:
            DatabaseUnavailableError: the database cannot be used; the next call continues.
        """
        while (due := self._wait_for_turn()) is not None:
            self._send(due)

    def _wait_for_turn(self) -> DueDelivery | None:
        # One thread looks for work at intervals, and the others wait for it.
        with self._looking:
            due = None
            try:
                due = None if self._stopped.is_set() else self._claim()
            finally:
                if due is None:
                    self._stopped.wait(self._settings.poll_seconds)
            return due

    def _claim(self) -> DueDelivery | None:
        with self._database.snapshot() as session:
            if not webhooks.is_delivery_due(session):
                return None
        with self._database.transaction() as session:
            return webhooks.claim_delivery(session)

    def _send(self, due: DueDelivery) -> None:
        began = time.monotonic()
        error = asyncio.run(self._attempt(due))
        is_slow = error is not None and time.monotonic() - began >= _SLOW_SECONDS
        with self._database.transaction() as session:
            webhooks.finish_delivery(session, due, error, is_slow=is_slow)
        if error is not None:
            _log.info("a webhook was not delivered: %s", error, extra={"delivery": due.id})

    async def _attempt(self, due: DueDelivery) -> str | None:
        """Send a delivery once; return why it failed, without anything that the receiver has sent."""
        allow_private = self._settings.webhooks_allow_private
        try:
            # The setting may have changed since the webhook was created.
            destination = parse_destination(due.url, allow_private=allow_private)
            secret = decrypt(self._settings, due.secret).get_secret_value()
            body = json.dumps(due.body, separators=(",", ":")).encode()
            timestamp = int(time.time())
            headers = {
                "Content-Type": "application/json",
                "User-Agent": "rocket-webhooks",
                "webhook-id": due.id,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": sign(due.id, timestamp, body, secret),
            }
            async with asyncio.timeout(_LONGEST_SECONDS):
                resolve = partial(destination.resolve, allow_private=allow_private)
                address = await to_thread.run_sync(resolve, abandon_on_cancel=True)
                status = await _post(destination, address, body, headers)
        except (ForbiddenAddressError, AppError) as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {_LONGEST_SECONDS:g} seconds"
        except (OSError, h11.ProtocolError) as error:
            return f"no answer ({type(error).__name__})"
        # Redirects are not followed: they could lead anywhere.
        return None if 200 <= status < 300 else f"status {status}"


def sign(delivery_id: str, timestamp: int, body: bytes, secret: str) -> str:
    """Return the `webhook-signature` of a delivery.

    Args:
        delivery_id: the `webhook-id`.
        timestamp: the `webhook-timestamp`, seconds since the epoch.
        body: the body.
        secret: `whsec_` and the key in base 64.
    """
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{delivery_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"


async def _post(destination: Destination, address: str, body: bytes, headers: dict[str, str]) -> int:
    """Send a request to an address that was checked, and return the status of the answer."""
    context = ssl.create_default_context() if destination.is_secure else None
    # The certificate is that of the name, whatever address it resolved to.
    name = destination.host if destination.is_secure else None
    reader, writer = await asyncio.open_connection(address, destination.port, ssl=context, server_hostname=name)
    try:
        sent = {"Host": destination.authority, **headers, "Content-Length": str(len(body)), "Connection": "close"}
        connection = h11.Connection(h11.CLIENT)
        head = h11.Request(method="POST", target=destination.target, headers=[*sent.items()])
        writer.write(b"".join(filter(None, map(connection.send, (head, h11.Data(body), h11.EndOfMessage())))))
        while not isinstance(event := connection.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(4096))
        return event.status_code
    finally:
        writer.transport.abort()
