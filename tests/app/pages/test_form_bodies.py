"""How the pages read what a browser sends, without delaying other requests."""

import socket
import threading
import time
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.params import Form
from fastapi.routing import iter_route_contexts

from app.pages.form_bodies import MAX_FIELDS, MAX_FORM_BYTES

ROOT = Path(__file__).parents[3]
URLENCODED = "application/x-www-form-urlencoded"
# With the codec of quadratic time it was more than 8 s.
LONGEST_WAIT_SECONDS = 3.0
# Answered before all of it was sent, with the response lost.
CLOSED = "closed"
PART = b"--xx\r\nContent-Disposition: form-data; name=key\r\n\r\n" + b"a" * 900_000 + b"\r\n--xx--\r\n"


@pytest.fixture
def settings(settings):
    return settings.model_copy(update={"max_body_bytes": 2**20})


def send(url, content_type, body):
    """Send a sign-in as it is, and return the status line."""
    address = urlsplit(url)
    head = f"POST /ui/sign-in HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: {content_type}\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=180) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        try:
            connection.sendall(body)
            return connection.recv(100).partition(b"\r\n")[0].decode()
        except ConnectionError:
            return CLOSED


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; boundary=xx; charset=punycode", PART),
        (f"{URLENCODED}; charset=punycode", b"key=" + b"a" * 900_000),
    ],
)
def test_a_body_in_a_slow_charset_blocks_no_other_request(url, content_type, body):
    answers = []
    sender = threading.Thread(target=lambda: answers.append(send(url, content_type, body)))
    waits = []
    with httpx2.Client(base_url=url, timeout=180, trust_env=False) as client:
        client.get("/healthz")
        sender.start()
        while sender.is_alive() or len(waits) < 3:
            began = time.monotonic()
            assert client.get("/healthz").status_code == 200
            waits.append(time.monotonic() - began)
    sender.join()
    assert answers[0] in {"HTTP/1.1 415 Unsupported Media Type", CLOSED}
    assert max(waits) < LONGEST_WAIT_SECONDS


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (URLENCODED, 401),
        (f"{URLENCODED};charset=UTF-8", 401),
        (f'{URLENCODED}; charset="utf8"', 401),
        (f"{URLENCODED}; charset=utf-16", 415),
        (f"{URLENCODED}; charset=utf-8; CHARSET=punycode", 415),
        (f"{URLENCODED}; charset*=punycode", 415),
        ("multipart/form-data; boundary=xx", 415),
        ("text/plain", 415),
        ("", 415),
    ],
)
def test_only_urlencoded_utf_8_forms_are_accepted(page, content_type, status):
    headers = {"Content-Type": content_type} if content_type else {}
    assert page("POST", "/ui/sign-in", content=b"key=x", headers=headers).status_code == status


def test_compressed_forms_and_two_content_types_are_refused(client):
    for extra in (("Content-Encoding", "gzip"), ("Content-Type", "text/plain")):
        answer = client.post("/ui/sign-in", content=b"key=x", headers=[("Content-Type", URLENCODED), extra])
        assert answer.status_code == 415


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"key=" + b"x" * (MAX_FORM_BYTES - 4), 401),
        (b"key=" + b"x" * (MAX_FORM_BYTES - 3), 413),
        (b"&".join([b"key=x"] * MAX_FIELDS), 401),
        (b"&".join([b"key=x"] * (MAX_FIELDS + 1)), 422),
        (b"key=%ff", 422),
        (b"key=\xff", 422),
        (b"", 401),
    ],
)
def test_forms_must_be_small_and_valid_utf_8(page, body, status):
    answer = page("POST", "/ui/sign-in", content=body, headers={"Content-Type": URLENCODED})
    assert answer.status_code == status


def test_only_an_empty_form_may_omit_its_type(page, submitted):
    assert page("POST", f"/ui/jobs/{submitted}/cancel").status_code == 303
    assert page("POST", f"/ui/jobs/{submitted}/cancel", content=b"from=list").status_code == 415


def test_no_endpoint_uses_the_frameworks_form_parser(app):
    seen = 0
    for route in iter_route_contexts(app.routes):
        dependant = getattr(route, "dependant", None) or getattr(route.original_route, "dependant", None)
        pending = [] if dependant is None else [dependant]
        while pending:
            found = pending.pop()
            pending += found.dependencies
            seen += 1
            assert not [field for field in found.body_params if isinstance(field.field_info, Form)], route.path
    assert seen > 20
    # The framework's reader would need it.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [name for name in project["dependencies"] if "multipart" in name]
