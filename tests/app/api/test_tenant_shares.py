"""A tenant that takes all it can get, and another that is served nevertheless."""

import socket
import threading
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest

from app.api.tenant_shares import SharedThreads, TenantSlots
from app.services import admission
from app.services.access import LOCAL_CALLER, Caller
from app.shared.repositories import keys
from tests.app.api.conftest import BODY
from tests.reference.fake_hub import FakeHub
from tests.reference.safetensors_files import llama_tensors, safetensors_bytes

# A client that had to wait for the other tenant would wait for longer.
PATIENCE_SECONDS = 20
GREEDY = 12
MAX_STREAMS = 8
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def settings(settings):
    return settings.model_copy(update={"max_streams": MAX_STREAMS})


@pytest.fixture
def authorized(context):
    """Return the headers of a tenant, by its name."""

    def authorized(tenant):
        with context.database.transaction() as session:
            return {"Authorization": f"Bearer {keys.create_key(session, tenant).text}"}

    return authorized


@pytest.fixture
def connect(url):
    """Yield a function that returns a client with its own connections."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False))


@pytest.fixture
def begin_upload(url):
    """Announce an upload of 1000 bytes, send one, and keep the connection."""
    address = urlsplit(url)
    with ExitStack() as stack:

        def begin(headers):
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            lines = [f"{name}: {value}" for name, value in (headers | TEXT | {"Host": address.netloc}).items()]
            head = "\r\n".join(["POST /calibrations HTTP/1.1", *lines, "Content-Length: 1000", "", "a"])
            connection.sendall(head.encode())
            return connection

        yield begin


def status_line(connection):
    return connection.recv(12).decode()


def test_slow_uploads_do_not_block_other_tenants(connect, begin_upload, authorized):
    greedy, other = authorized("greedy"), authorized("other")
    slow = [begin_upload(greedy) for _ in range(GREEDY)]
    # Two are received, the others refused; the server decides the order in which they are read. Until it has read
    # two, this text is received as well: first as new, 201, then as a known one, 200.
    until = time.monotonic() + PATIENCE_SECONDS
    refused = connect().post("/calibrations", content=b"text", headers=greedy | TEXT)
    while refused.is_success and time.monotonic() < until:
        refused = connect().post("/calibrations", content=b"text", headers=greedy | TEXT)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_uploads")
    assert int(refused.headers["Retry-After"]) > 0
    for _ in range(3):
        assert connect().post("/calibrations", content=b"text", headers=other | TEXT).status_code in {200, 201}
    for connection in slow:
        connection.close()


def test_an_upload_has_a_deadline_and_releases_its_place(app, connect, begin_upload, authorized):
    headers = authorized("slow")
    app.state.upload_receiver._seconds = 1.5
    slow = [begin_upload(headers) for _ in range(2)]
    until = time.monotonic() + 10
    sent = 1
    ended = threading.Event()

    def trickle():
        nonlocal sent
        while not ended.wait(0.1) and time.monotonic() < until:
            for connection in slow:
                try:
                    connection.sendall(b"a")
                except OSError:
                    return
            sent += 1

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [status_line(connection) for connection in slow] == ["HTTP/1.1 408"] * 2
    ended.set()
    thread.join()
    assert 1 < sent < 1000
    assert connect().post("/calibrations", content=b"text", headers=headers | TEXT).status_code == 201


def test_waiting_requests_leave_streams_to_other_tenants(connect, authorized):
    greedy, other = authorized("greedy"), authorized("other")
    theirs, mine = (connect().post("/jobs", json=BODY, headers=who).json()["id"] for who in (greedy, other))
    answers = []

    def wait():
        answers.append(connect().get(f"/jobs/{theirs}", headers=greedy | {"Prefer": "wait=8"}))

    threads = [threading.Thread(target=wait) for _ in range(GREEDY)]
    for thread in threads:
        thread.start()
    # More requests than may wait in total: the others are answered at once.
    until = time.monotonic() + 30
    while len(answers) < GREEDY - MAX_STREAMS and time.monotonic() < until:
        time.sleep(0.05)
    stream = {"Accept": "text/event-stream"}
    with connect().stream("GET", f"/jobs/{mine}/events", headers=other | stream) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_lines()).startswith("event: ")
    for thread in threads:
        thread.join()
    waited = [answer for answer in answers if "Preference-Applied" in answer.headers]
    assert len(answers) == GREEDY
    assert 2 <= len(waited) < GREEDY


def test_requests_to_a_slow_hub_leave_places_to_other_tenants(connect, authorized, monkeypatch):
    monkeypatch.setattr(admission, "_HUB_SECONDS", 3.0)
    greedy, other = authorized("greedy"), authorized("other")
    statuses = []

    def estimate():
        body = BODY | {"model_id": "org/slow"}
        statuses.append(connect().post("/estimates", json=body, headers=greedy).status_code)

    with FakeHub() as hub:
        hub.replace_the_hub(monkeypatch)
        hub.repositories["org/model"] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": safetensors_bytes(llama_tensors()),
            "tokenizer.json": b"{}",
        }
        hub.silent = ["/api/models/org/slow"]
        # As many as may ask the Hub at once, of all tenants.
        threads = [threading.Thread(target=estimate) for _ in range(admission._HUB_SLOTS["most"])]
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE_SECONDS
        while not hub.asked and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)  # until the admitted requests arrive
        answer = connect().post("/estimates", json=BODY | {"model_id": "org/model"}, headers=other)
        assert answer.status_code == 200, answer.text
        for thread in threads:
            thread.join()
    assert statuses == [503] * admission._HUB_SLOTS["most"]


def caller(tenant):
    return Caller(tenant=tenant, scopes=frozenset(), key_id="0" * 16)


def test_places_are_shared_and_a_single_tenant_may_use_all():
    slots = TenantSlots(4, share=2)
    assert [slots.try_acquire(caller("a")) for _ in range(3)] == [True, True, False]
    assert [slots.try_acquire(caller(name)) for name in "bcd"] == [True, True, False]
    slots.release(caller("a"))
    assert slots.try_acquire(caller("d"))
    alone = TenantSlots(4, share=2)
    assert [alone.try_acquire(LOCAL_CALLER) for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_tenant_cannot_occupy_every_thread(anyio_backend):
    threads = SharedThreads(4, share=2)
    release, running = threading.Event(), []

    def hang():
        running.append(1)
        release.wait(60)

    async with anyio.create_task_group() as tasks:
        for _ in range(GREEDY):
            tasks.start_soon(threads.of(caller("greedy")).run, hang)
        try:
            with anyio.fail_after(PATIENCE_SECONDS):
                while len(running) < 2:
                    await anyio.sleep(0.01)
                assert await threads.of(caller("other")).run(lambda: "served") == "served"
        finally:
            assert len(running) == 2
            release.set()
    assert len(running) == GREEDY
