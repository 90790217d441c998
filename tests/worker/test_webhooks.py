"""Deliveries of webhooks to a real receiver on the loopback."""

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from app.shared.encryption import encrypt
from app.shared.models import Tenant, Webhook, WebhookDelivery
from app.shared.repositories import jobs, tenants, webhooks
from app.shared.webhook_addresses import parse_destination
from tests.worker.waiting import eventually
from worker import webhooks as sending
from worker.webhooks import WebhookSender

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
EVENTS = ("job.succeeded", "job.failed", "job.cancelled")


class Receiver:
    """A receiver that notes what it gets, and answers with the statuses that it is told."""

    def __init__(self):
        self.received, self.answers = [], []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append((self.path, dict(self.headers), body))
                status = receiver.answers.pop(0) if receiver.answers else 204
                if status in {"slow line", "slow headers"}:
                    self.wfile.write(b"HTTP/1.1 204 No Content\r\n" if status == "slow headers" else b"HTTP")
                    with suppress(OSError):
                        for number in range(100):
                            self.wfile.write(f"X-{number}: a\r\n".encode() if status == "slow headers" else b"H")
                            time.sleep(0.1)
                    return
                self.send_response(status)
                self.send_header("Location", receiver.url + "/elsewhere")
                self.end_headers()

            def log_message(self, *_arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Closing waits for their threads.
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def settings(configure):
    return configure(webhooks_allow_private=True)


@pytest.fixture
def send(settings, database):
    def send(chosen=settings):
        WebhookSender(chosen, database, threading.Event()).send_due()

    return send


@pytest.fixture
def ended(database, settings, submit):
    """End a job of a tenant with a webhook, and return the id of the webhook."""

    def ended(url):
        with database.transaction() as session:
            tenants.ensure_tenant(session, "local")
            hook = webhooks.create_webhook(session, "local", url, EVENTS, encrypt(settings, SecretStr(SECRET)))
        with database.transaction() as session:
            jobs.cancel_job(session, submit())
        return hook.id

    return ended


@pytest.fixture
def make_hook(database, settings):
    """Create a webhook of a tenant, with a test delivery that is due."""

    def make_hook(tenant, url):
        with database.transaction() as session:
            tenants.ensure_tenant(session, tenant)
            secret = encrypt(settings, SecretStr(SECRET))
            webhooks.queue_test(session, webhooks.create_webhook(session, tenant, url, EVENTS, secret))

    return make_hook


@pytest.fixture
def silent():
    """Yield the address of a receiver that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def deliveries(database):
    def deliveries():
        with database.snapshot() as session:
            return session.query(WebhookDelivery).all()

    return deliveries


@pytest.fixture
def make_due(database):
    def make_due():
        with database.transaction() as session:
            for row in session.query(WebhookDelivery):
                row.available_at = row.available_at and datetime.now(UTC) - timedelta(seconds=1)
            session.query(Tenant).update({"next_delivery_at": None})

    return make_due


def test_a_delivery_is_signed_and_sent_once(receiver, ended, send, deliveries):
    ended(receiver.url + "/hook?a=b")
    send()
    send()
    [(path, headers, body)] = receiver.received
    assert path == "/hook?a=b"
    [row] = deliveries()
    assert (row.attempt, row.available_at, row.error, row.delivered_at is None) == (1, None, None, False)
    assert headers["webhook-id"] == row.id
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"k" * 32, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert json.loads(body)["type"] == "job.cancelled"


def test_a_refused_delivery_is_repeated_with_backoff(receiver, ended, send, deliveries, make_due):
    receiver.answers = [500] * webhooks.MOST_ATTEMPTS
    ended(receiver.url)
    waits = []
    for _ in range(webhooks.MOST_ATTEMPTS):
        send()
        [row] = deliveries()
        assert row.error == "status 500"
        if row.available_at is not None:
            waits.append((row.available_at - datetime.now(UTC)).total_seconds())
            # Not yet.
            send()
        make_due()
    assert len(receiver.received) == webhooks.MOST_ATTEMPTS
    assert len({headers["webhook-id"] for _, headers, _ in receiver.received}) == 1
    assert waits == pytest.approx([30, 120, 480, 1920, 7680, 30720, 43200], abs=20)
    make_due()
    send()
    assert len(receiver.received) == webhooks.MOST_ATTEMPTS, "given up"


def test_a_later_attempt_delivers(receiver, ended, send, deliveries, make_due):
    receiver.answers = [503]
    ended(receiver.url)
    send()
    make_due()
    send()
    [row] = deliveries()
    assert (row.attempt, row.error, row.delivered_at is None) == (2, None, False)


def test_what_a_dead_worker_was_sending_is_sent_again(receiver, ended, send, database, make_due):
    ended(receiver.url)
    with database.transaction() as session:
        assert webhooks.claim_delivery(session) is not None
    send()
    assert receiver.received == []
    make_due()
    send()
    assert len(receiver.received) == 1


def test_redirects_are_not_followed(receiver, ended, send, deliveries):
    receiver.answers = [307]
    ended(receiver.url)
    send()
    assert [path for path, _, _ in receiver.received] == ["/"]
    assert deliveries()[0].error == "status 307"


@pytest.mark.parametrize("name", ["127.0.0.1", "rebind.example"])
def test_nothing_is_sent_into_private_networks(receiver, ended, send, deliveries, configure, monkeypatch, name):
    real, port = socket.getaddrinfo, int(receiver.url.rsplit(":", 1)[1])
    # The name is public when the webhook is created, and private later.
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *arguments, **options: real(
            "127.0.0.1" if host == "rebind.example" else host, *arguments, **options
        ),
    )
    ended(f"https://{name}:{port}/")
    send(configure())
    assert receiver.received == []
    assert "public internet" in deliveries()[0].error


def test_the_checked_address_is_connected_to(receiver, monkeypatch):
    destination = parse_destination(receiver.url.replace("127.0.0.1", "name.example"), allow_private=True)
    headers = {"Content-Type": "application/json"}
    assert asyncio.run(sending._post(destination, "127.0.0.1", b"{}", headers)) == 204
    assert receiver.received[0][1]["Host"] == f"name.example:{destination.port}"


@pytest.mark.parametrize("answer", ["slow line", "slow headers"])
def test_a_receiver_that_never_ends_its_answer_is_cut_off(receiver, ended, send, deliveries, monkeypatch, answer):
    monkeypatch.setattr(sending, "_LONGEST_SECONDS", 0.3)
    receiver.answers = [answer]
    ended(receiver.url)
    began = time.monotonic()
    send()
    assert time.monotonic() - began < 5
    assert deliveries()[0].error == "no answer within 0.3 seconds"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_receiver_that_never_answers_is_cut_off(silent, ended, send, deliveries, monkeypatch, scheme):
    monkeypatch.setattr(sending, "_LONGEST_SECONDS", 0.3)
    ended(f"{scheme}://{silent}")
    began = time.monotonic()
    send()
    assert time.monotonic() - began < 5
    assert deliveries()[0].error == "no answer within 0.3 seconds"


def test_a_name_that_takes_long_to_resolve_is_cut_off(ended, send, deliveries, monkeypatch):
    monkeypatch.setattr(sending, "_LONGEST_SECONDS", 0.3)
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: answered.wait(60) and [])
    ended("http://slow.example")
    try:
        send()
        assert deliveries()[0].error == "no answer within 0.3 seconds"
    finally:
        answered.set()
        eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("AnyIO")])


def test_an_address_that_fails_slowly_rests(silent, receiver, ended, send, database, monkeypatch):
    monkeypatch.setattr(sending, "_LONGEST_SECONDS", 0.3)
    monkeypatch.setattr(sending, "_SLOW_SECONDS", 0.2)
    receiver.answers = [500]
    slow, broken = ended(f"http://{silent}"), ended(receiver.url)
    send()
    with database.snapshot() as session:
        failures = {hook.id: hook.slow_failures for hook in session.query(Webhook)}
    assert (failures[slow] > 0, failures[broken]) == (True, 0)


def test_silent_receivers_of_one_tenant_delay_no_other(receiver, make_hook, settings, database, in_background):
    stopped = threading.Event()
    sender = WebhookSender(settings, database, stopped)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(10):
            make_hook("attacker", f"http://127.0.0.1:{silent.getsockname()[1]}")
        make_hook("other", receiver.url)
        threads = [in_background(sender.send_due) for _ in range(sending.AT_ONCE)]
        eventually(lambda: receiver.received)
        # Now, while the first of the silent ones holds its tenant's turn.
        stopped.set()
    for thread in threads:
        thread.join()
    with database.snapshot() as session:
        attempts = sorted(row.attempt for row in session.query(WebhookDelivery))
    assert attempts == [0] * 9 + [1, 1]


def test_an_absent_receiver_and_a_plain_one_are_noted(receiver, ended, send, deliveries):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ended(f"http://127.0.0.1:{free.getsockname()[1]}")
        send()
    assert deliveries()[0].error == "no answer (ConnectionRefusedError)"
    # TLS with something that does not speak it.
    destination = parse_destination(receiver.url.replace("http:", "https:"), allow_private=True)
    with pytest.raises(OSError, match=r"SSL|ssl"):
        asyncio.run(sending._post(destination, "127.0.0.1", b"{}", {}))


def test_old_deliveries_are_forgotten_unless_they_are_due(receiver, ended, send, database, deliveries):
    ended(receiver.url)
    with database.transaction() as session:
        webhooks.forget_deliveries(session, retention=timedelta(0))
    assert len(deliveries()) == 1
    send()
    with database.transaction() as session:
        webhooks.forget_deliveries(session, retention=timedelta(0))
    assert deliveries() == []
