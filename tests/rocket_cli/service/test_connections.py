"""Deadlines and limits of connections, through real sockets on the server of `rocket serve` and `rocket api`."""

import asyncio
import os
import re
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from rocket_cli.service.connections import choose_limits
from tests.loopback_service import wait_for
from tests.rocket_cli.service.sockets import HEAD, PATIENCE, Connection, problem_of

ROCKET = Path(sys.executable).parent / "rocket"
HALF_HEAD = b"GET /healthz HTTP/1.1\r\nHost: loc"


def test_an_incomplete_head_is_refused_at_the_deadline(serve, dial):
    server = serve(head_seconds=0.5)
    halves = [dial(server) for _ in range(20)]
    for half in halves:
        half.send(HALF_HEAD)
    for half in halves:
        assert problem_of(half.read()) == (408, "request_timeout")


def test_a_slow_head_is_refused(serve, dial):
    server = serve(head_seconds=0.5)
    assert problem_of(dial(server).drip(b"G")) == (408, "request_timeout")


def test_a_connection_without_request_is_closed_silently(serve, dial):
    assert dial(serve(head_seconds=0.5)).read() == b""


def test_a_second_head_has_the_same_deadline(serve, dial):
    reused = dial(serve(head_seconds=1))
    assert reused.ask()[0] == 200
    reused.send(HALF_HEAD)
    assert problem_of(reused.read()) == (408, "request_timeout")


def test_a_connection_is_kept_alive_for_the_next_request(serve, dial):
    kept = dial(serve(head_seconds=3))
    # Longer in total than one head may take.
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert kept.ask()[0] == 200
        time.sleep(0.2)
    # Two pipelined requests are answered one after the other.
    kept.send((HEAD + b"\r\n") * 2)
    assert kept.read().count(b"200 OK") == 2


def test_an_idle_connection_is_closed_after_a_response(serve, dial):
    kept = dial(serve())
    assert kept.ask()[0] == 200
    assert kept.read() == b""


def test_the_rest_of_a_refused_body_does_not_keep_the_connection(serve, dial):
    slow = dial(serve(head_seconds=0.5))
    status, _ = slow.ask(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    assert status == 404
    assert slow.drip() == b""


def test_an_event_stream_outlives_all_deadlines(serve, dial, service):
    server = serve(head_seconds=0.5, send_seconds=0.5, body_seconds=0.5)
    stream = dial(server)
    path = f"/jobs/{service.submit()}/events"
    stream.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
    assert b"200 OK" in stream.socket.recv(2**16)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        if not stream.is_open():
            assert stream.socket.recv(2**16) != b""
        time.sleep(0.1)


def test_the_oldest_idle_connection_of_an_address_is_replaced(serve, dial):
    server = serve(max_connections_per_address=5)
    first, *others = [dial(server) for _ in range(5)]
    assert others[0].ask()[0] == 200
    # On the loopback every 127.x.x.x is an address.
    elsewhere = dial(server, source="127.0.0.2")
    newest = dial(server)
    assert newest.ask()[0] == 200
    assert first.read() == b""
    assert all(connection.is_open() for connection in [*others, elsewhere, newest])


def test_an_address_with_only_busy_connections_is_refused(serve, dial, service):
    server = serve(max_connections_per_address=3)
    request = f"GET /jobs/{service.submit()}?x HTTP/1.1\r\nHost: localhost\r\nPrefer: wait=30\r\n\r\n".encode()
    busy = [dial(server) for _ in range(3)]
    for connection in busy:
        connection.send(request)
    state = server.server.server_state
    wait_for(lambda: len(state.tasks) == 3)
    assert problem_of(dial(server).read()) == (429, "quota_exceeded")
    assert dial(server, source="127.0.0.2").ask()[0] == 200
    assert all(connection.is_open() for connection in busy)
    busy[0].close()
    wait_for(lambda: len(state.connections) < 4)
    assert dial(server).ask()[0] == 200


def test_a_trusted_proxy_has_unlimited_connections(serve, dial):
    server = serve(max_connections_per_address=3, trusted_proxies="127.0.0.1", head_seconds=PATIENCE)
    many = [dial(server) for _ in range(10)]
    assert many[-1].ask()[0] == 200
    assert all(connection.is_open() for connection in many)


def test_a_client_that_does_not_read_is_disconnected(serve, dial, service):
    server = serve(send_seconds=1)
    size = 2**25
    job_id = service.succeeded({"model.safetensors": bytes(size)})
    request = f"GET /jobs/{job_id}/artifacts/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    deaf = dial(server, receive_buffer=2**14)
    deaf.send(request)
    state = server.server.server_state
    wait_for(lambda: state.total_requests == 0 and state.tasks)
    wait_for(lambda: not state.connections and not state.tasks)
    assert len(deaf.read()) < size


def test_a_slowly_reading_client_receives_everything(serve, dial, service):
    server = serve(send_seconds=1)
    size = 2**22
    job_id = service.succeeded({"model.safetensors": bytes(size)})
    request = f"GET /jobs/{job_id}/artifacts/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    slow = dial(server, receive_buffer=2**14)
    slow.send(request)
    found = 0
    while found < size:
        data = slow.socket.recv(2**15)
        assert data
        found += len(data)
        time.sleep(0.03)


def test_invalid_framing_during_a_response_is_not_a_server_error(serve, dial, service, caplog):
    stream = dial(serve())
    path = f"/jobs/{service.submit()}/events"
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    stream.send(head.encode())
    assert b"200 OK" in stream.socket.recv(2**16)
    stream.send(b"not a chunk\r\n\r\n")
    stream.read()
    assert [record for record in caplog.records if record.exc_info] == []


def test_healthz_answers_while_all_threads_are_busy(serve, dial):
    server = serve()

    async def take_all_threads():
        limiter = anyio.to_thread.current_default_thread_limiter()
        while limiter.available_tokens:
            limiter.acquire_on_behalf_of_nowait(object())

    asyncio.run_coroutine_threadsafe(take_all_threads(), server.loop).result()
    assert dial(server).ask()[0] == 200


def test_one_address_cannot_take_all_connections(service, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *_arguments: None)
    for soft, total in ((200, 100), (1024, 768), (2**20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, soft=soft: (soft, soft))
        limits = choose_limits(service.settings.model_copy(update={"max_connections_per_address": 10**6}))
        assert (limits.total, limits.per_address) == (total, total // 2)


@contextmanager
def rocket_serve(tmp_path, descriptors):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCKET_", "HF_TOKEN"))}
    command = [ROCKET, "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            ["/bin/sh", "-c", f'ulimit -n {descriptors} && exec "$0" "$@"', *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=kept | {"ROCKET_HEAD_SECONDS": "60"},
        ) as process,
    ):
        try:
            line = process.stdout.readline().decode()
            assert line.startswith("Serving on http://127.0.0.1:"), log.read_text()
            yield process, ("127.0.0.1", int(line.rpartition(":")[2])), log
        finally:
            process.kill()


@pytest.mark.parametrize("data", [b"", HALF_HEAD], ids=["silent", "half a head"])
def test_idle_connections_beyond_the_limit_do_not_stop_it(tmp_path, dial, stack, data):
    with rocket_serve(tmp_path, descriptors=200) as (process, address, log):
        for number in range(400):
            connection = Connection(address, source=f"127.0.{number % 5}.1")
            stack.callback(connection.close)
            connection.send(data)
            if number % 40 == 39:
                asking = Connection(address)
                assert asking.ask()[0] == 200, number
                asking.close()
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max open files +200 +200 ", limits)
        assert "out of system resource" not in log.read_text()
        wait_for(lambda: "connections closed by their limits" in log.read_text())
