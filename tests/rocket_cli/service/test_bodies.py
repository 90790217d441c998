"""Bodies that arrive slowly or not at all, through real sockets on the server that `rocket serve` runs."""

import json
import time

import pytest

from tests.loopback_service import wait_for
from tests.rocket_cli.service.sockets import HEAD, problem_of

JOB = json.dumps({"model_id": "local/tiny", "ratio": 0.3}).encode()


def head(path, length, kind="application/json", method="POST", more=""):
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


def records(caplog):
    return [record for record in caplog.records if record.exc_info or record.levelname in {"ERROR", "CRITICAL"}]


SLOW = [
    ("/jobs", "application/json"),
    ("/estimates", "application/json"),
    ("/calibrations", "text/plain"),
    ("/ui/sign-in", "application/x-www-form-urlencoded"),
    ("/ui/new/preview", "application/x-www-form-urlencoded"),
]


@pytest.mark.parametrize(("path", "kind"), SLOW[:4])
def test_a_client_that_stalls_within_a_body_is_refused(serve, dial, caplog, path, kind):
    silent = dial(serve(body_seconds=1))
    silent.send(head(path, 1000, kind) + b"{")
    assert problem_of(silent.read()) == (408, "request_timeout")
    assert records(caplog) == []


@pytest.mark.parametrize(("path", "kind"), SLOW[:4])
def test_a_slow_body_is_refused(serve, dial, caplog, path, kind):
    slow = dial(serve(body_seconds=2, min_body_rate=1024))
    slow.send(head(path, 10_000, kind))
    assert problem_of(slow.drip()) == (408, "request_timeout")
    assert records(caplog) == []


def test_a_small_body_may_be_slow_if_complete_in_time(serve, dial):
    slow = dial(serve(body_seconds=20))
    slow.send(head("/estimates", len(JOB)))
    for number in range(len(JOB) - 1):
        slow.send(JOB[number : number + 1])
        time.sleep(0.02)
    status, _ = slow.ask(JOB[-1:])
    assert status == 200


def test_a_slow_body_above_the_minimum_rate_is_received(serve, dial):
    slow = dial(serve(body_seconds=2, min_body_rate=100))
    line = b'{"text": "' + b"a" * 88 + b'"}'
    slow.send(head("/calibrations", 40 * len(line) + 39, "application/jsonl"))
    for _ in range(39):
        slow.send(line + b"\n")
        time.sleep(0.1)
    status, body = slow.ask(line)
    assert (status, json.loads(body)["documents"]) == (201, 40)


def test_a_missing_body_ends_a_started_response(serve, dial, service, caplog):
    stream = dial(serve(body_seconds=1))
    path = f"/jobs/{service.submit()}/events"
    stream.send(head(path, 10, method="GET", more="Accept: text/event-stream\r\n"))
    answer = stream.read()
    assert b"200 OK" in answer
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(("path", "kind"), SLOW)
def test_a_disconnecting_client_is_not_an_error(serve, dial, caplog, path, kind):
    caplog.set_level("INFO")
    server = serve()
    gone = dial(server)
    gone.send(head(path, 1000, kind) + b"{")
    state = server.server.server_state
    wait_for(lambda: state.tasks)
    gone.close()
    wait_for(lambda: not state.tasks)
    assert records(caplog) == []
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert line.status == 400
    metrics = dial(server)
    metrics.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b'status="500"' not in metrics.read()


@pytest.mark.parametrize("order", [1, -1])
def test_a_body_with_two_lengths_ends_the_connection(serve, dial, order):
    smuggler = dial(serve())
    lengths = ["Content-Length: 5", "Transfer-Encoding: chunked"][::order]
    lines = ("POST /jobs HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lengths, "", "")
    smuggler.send("\r\n".join(lines).encode() + b"0\r\n\r\n" + HEAD + b"\r\n")
    found = smuggler.read()
    assert found.count(b"HTTP/1.1 ") == 1, found
    assert b"connection: close" in found.lower()


def test_a_chunked_body_keeps_the_connection(serve, dial):
    client = dial(serve())
    chunked = head("/jobs", 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"0\r\n\r\n"
    assert client.ask(chunked)[0] == 422
    assert client.ask()[0] == 200
