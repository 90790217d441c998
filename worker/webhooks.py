"""Deliveries of webhooks: signed, sent to a checked address, repeated until the receiver accepts them.

The signature is that of Standard Webhooks: HMAC-SHA256 over id, time and body.
"""

import base64
import hashlib
import hmac
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from contextlib import closing, suppress

from app.shared.database import Database
from app.shared.encryption import decrypt
from app.shared.errors import AppError
from app.shared.repositories import webhooks
from app.shared.repositories.webhooks import DueDelivery
from app.shared.settings import Settings
from app.shared.webhook_addresses import Destination, ForbiddenAddressError, parse_destination

_CONNECT_SECONDS = 5.0
# For the whole exchange, however slowly the receiver answers.
_EXCHANGE_SECONDS = 15.0
_log = logging.getLogger(__name__)


class WebhookSender:
    """Sends what is due; several may run at once.

    Args:
        settings: settings of the service.
        database: the database.
        stopped: set when the worker stops; what is not sent by then is sent later.
    """

    def __init__(self, settings: Settings, database: Database, stopped: threading.Event) -> None:
        self._settings = settings
        self._database = database
        self._stopped = stopped

    def send_due(self) -> None:
        """Attempt every delivery that is due.

        Raises:
            DatabaseUnavailableError: the database cannot be used; the next call continues.
        """
        while not self._stopped.is_set():
            with self._database.snapshot() as session:
                if not webhooks.is_delivery_due(session):
                    return
            with self._database.transaction() as session:
                due = webhooks.claim_delivery(session)
            if due is None:
                return
            error = self._attempt(due)
            with self._database.transaction() as session:
                webhooks.finish_delivery(session, due.id, error)
            if error is not None:
                _log.info("a webhook was not delivered: %s", error, extra={"delivery": due.id})

    def _attempt(self, due: DueDelivery) -> str | None:
        """Send a delivery once; return why it failed, without anything that the receiver has sent."""
        allow_private = self._settings.webhooks_allow_private
        try:
            # The setting may have changed since the webhook was created.
            destination = parse_destination(due.url, allow_private=allow_private)
            address = destination.resolve(allow_private=allow_private)
            secret = decrypt(self._settings, due.secret).get_secret_value()
            body = json.dumps(due.body, separators=(",", ":")).encode()
            status = _post(destination, address, body, _headers(due.id, int(time.time()), body, secret))
        except (ForbiddenAddressError, AppError) as error:
            return str(error)
        except (OSError, http.client.HTTPException) as error:
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


def _headers(delivery_id: str, timestamp: int, body: bytes, secret: str) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "User-Agent": "rocket-webhooks",
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(delivery_id, timestamp, body, secret),
    }


def _post(destination: Destination, address: str, body: bytes, headers: dict[str, str]) -> int:
    """Send a request to an address that was checked, and return the status of the answer."""
    connection = http.client.HTTPConnection(destination.host, destination.port, timeout=_CONNECT_SECONDS)
    with closing(_connect(destination, address)) as stream, closing(connection):
        connection.sock = stream
        # Timeouts of the socket are between two bytes, of which a receiver could send many.
        limit = threading.Timer(_EXCHANGE_SECONDS, _cut, [stream])
        limit.start()
        try:
            connection.request("POST", destination.target, body, {"Host": destination.authority, **headers})
            return connection.getresponse().status
        finally:
            limit.cancel()


def _connect(destination: Destination, address: str) -> socket.socket:
    plain = socket.create_connection((address, destination.port), timeout=_CONNECT_SECONDS)
    if not destination.is_secure:
        return plain
    try:
        # The certificate is that of the name, whatever address it resolved to.
        return ssl.create_default_context().wrap_socket(plain, server_hostname=destination.host)
    except BaseException:
        plain.close()
        raise


def _cut(stream: socket.socket) -> None:
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
