"""Malformed and hostile requests at every endpoint: they are refused properly, and never echoed."""

import io
import itertools
import json
import logging
from pathlib import Path

import pytest

from app.shared.logging import configure_logging
from app.shared.repositories import keys
from app.shared.settings import Settings
from tests.app.api.conftest import BODY
from tests.sampling import sweep

CANARY = "canary-hunter2"
BODIES = [
    b"",
    b"null",
    b"\xff\xfe" + CANARY.encode(),
    b'{"' + CANARY.encode(),
    b"NaN",
    b"[" * 3000,
    *(b"[" * depth + b"]" * depth for depth in (300, 900, 930, 960, 980)),
    b'{"model_id":' * 300 + b"1" + b"}" * 300,
    *(b'{"metadata":' + b"[" * depth + b"]" * depth + b"}" for depth in (300, *range(860, 990, 10))),
    json.dumps(BODY | {"ratio": float("nan")}).encode(),
    json.dumps(BODY | {"ratio": float("inf")}).encode(),
    b'{"model_id": "local/tiny", "ratio": 1e999}',
    b'{"model_id": "local/tiny", "ratio": 0.' + b"3" * 3000 + b"}",
    b'{"model_id": "local/tiny", "ratio": ' + b"9" * 3500 + b"}",
    b'{"model_id": "local/tiny", "ratio": 0.3, "calibration": {"seed": ' + b"9" * 3500 + b"}}",
    json.dumps(BODY | {"metadata": {CANARY: "\x00"}}).encode(),
    json.dumps(BODY | {"metadata": {"\ud800": CANARY}}).encode(),
    json.dumps(BODY | {"model_id": f"local/{CANARY}\x00"}).encode(),
    json.dumps(BODY | {"revision": "\udfff" + CANARY}).encode(),
    json.dumps(BODY | {CANARY: CANARY}).encode(),
    json.dumps([CANARY]).encode(),
]
TEXTS = [
    "",
    "\x00",
    CANARY + "\x00",
    "\ud83d",
    "NaN",
    "-1",
    "1e999",
    "9" * 400,
    CANARY * 100,
    "../" + CANARY,
    "%00",
    "\u202e",
]
HEADERS = ["Idempotency-Key", "Prefer", "Last-Event-ID", "If-None-Match", "Range", "Accept", "X-Request-Id", "If-Range"]
HEADERS += ["Content-Range", "Content-Digest"]
RAW = [b"", b"\xff\xfe", CANARY.encode(), b"9" * 400, b'"' * 300, b"wait=" + b"9" * 400, b"bytes=" + b"9" * 400 + b"-"]


# One in so many requests is sent. Without a common factor with the numbers of bodies, headers and texts, each of them
# still reaches some endpoints.
APART = sweep([7], soak=[1])


@pytest.fixture
def settings(settings):
    # Otherwise most of these requests would not arrive.
    return settings.model_copy(update={"rate_limit": "100000/minute", "submit_rate_limit": "100000/minute"})


@pytest.fixture
def log():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    lines = io.StringIO()
    configure_logging(Settings(log_level="debug"), lines)
    # The test's own client logs what it sends.
    quiet = logging.getLogger("httpx2")
    quiet.disabled = True
    yield lines
    quiet.disabled = False
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
def done(client, worker):
    job_id = client.post("/jobs", json=BODY).json()["id"]
    worker.succeed(job_id, {"model.safetensors": b"0123456789"})
    return job_id


@pytest.fixture
def profile_id(client, worker):
    return worker.profile_model(client.post("/jobs", json=BODY).json()["id"])


@pytest.fixture
def operations(app, client, done, profile_id):
    document = app.openapi()
    files = [{"path": path, "size": 2} for path in ("config.json", "model.safetensors")]
    assert client.post("/models", json={"name": "mine", "files": files}).status_code == 201
    hook = client.post("/webhooks", json={"url": "https://example.org/hook"}).json()["id"]
    uploaded = {"upload_id": "0" * 32, "model_name": "mine", "file": "config.json", "webhook_id": hook}
    return [
        (
            method.upper(),
            path.format(job_id=done, profile_id=profile_id, name="model.safetensors", **uploaded),
            operation.get("parameters", []),
        )
        for path, item in document["paths"].items()
        for method, operation in item.items()
        # Otherwise nothing would be left to request.
        if method != "delete"
    ]


def require_good_order(answer, log):
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 429, "this test would not arrive"
    assert CANARY not in answer.text
    assert CANARY not in log.getvalue()
    if answer.status_code >= 400:
        assert answer.headers["Content-Type"] == "application/problem+json"


def stored(settings):
    file = Path(settings.database.database)
    return b"".join(part.read_bytes() for part in file.parent.glob(f"{file.name}*"))


@pytest.mark.parametrize("apart", APART)
def test_hostile_bodies_break_no_endpoint_and_are_not_echoed(client, operations, log, settings, apart):
    headers = {"Content-Type": "application/json"}
    requests = itertools.product(operations, BODIES)
    for (method, path, _parameters), body in itertools.islice(requests, 0, None, apart):
        require_good_order(client.request(method, path, content=body, headers=headers), log)
    assert CANARY.encode() not in stored(settings)


@pytest.mark.parametrize("apart", APART)
def test_hostile_queries_break_no_endpoint_and_are_not_echoed(client, operations, log, apart):
    asked = []
    for method, path, parameters in operations:
        names = {item["name"] for item in parameters if item["in"] == "query"} - {"metadata"}
        asked += [(method, f"{path}?{name}") for name in sorted(names | {"metadata[a]", "metadata[", CANARY})]
    for (method, address), text in itertools.islice(itertools.product(asked, TEXTS), 0, None, apart):
        encoded = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
        require_good_order(client.request(method, f"{address}={encoded}"), log)


@pytest.mark.parametrize("apart", APART)
def test_hostile_headers_break_no_endpoint_and_are_not_echoed(client, operations, log, apart):
    # The last one is meant to be echoed.
    given = [pair for pair in itertools.product(HEADERS, RAW) if pair != ("X-Request-Id", CANARY.encode())]
    for (method, path, _parameters), (name, raw) in itertools.islice(
        itertools.product(operations, given), 0, None, apart
    ):
        sent = [(name.encode(), raw), (b"Content-Type", b"application/json")]
        body = json.dumps(BODY).encode() if method == "POST" else None
        require_good_order(client.request(method, path, headers=sent, content=body), log)


def test_hostile_paths_break_nothing_and_are_not_echoed(client, log, done):
    for text in TEXTS:
        encoded = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
        for path in (f"/jobs/{encoded}", f"/jobs/{done}/artifacts/{encoded}", f"/{encoded}", f"/jobs/{done}/{encoded}"):
            for method in ("GET", "POST", "DELETE", "HEAD"):
                if method == "DELETE" and not text:
                    continue
                require_good_order(client.request(method, path), log)


def test_keys_are_in_no_response_log_line_or_database(client, context, log, settings, operations):
    with context.database.transaction() as session:
        good, revoked = (keys.create_key(session, "alice") for _ in range(2))
        keys.revoke_key(session, revoked.row.id)
    wrong = f"rk_{good.row.id}_{'ab' * 32}"
    secrets = [key.rsplit("_", 1)[1] for key in (good.text, revoked.text, wrong)]
    answers = []
    for key in (good.text, revoked.text, wrong):
        headers = {"Authorization": f"Bearer {key}"}
        for method, path, _parameters in operations:
            answers.append(client.request(method, path, headers=headers, json=BODY | {"api_key": key}))
            answers.append(client.request(method, f"{path}?api_key={key}", headers={"Authorization": f"Basic {key}"}))
    assert {answer.status_code for answer in answers} >= {200, 401}
    said = "".join(answer.text + repr(answer.headers) for answer in answers) + log.getvalue()
    assert "request" in log.getvalue()
    context.database.close()
    for secret in secrets:
        assert secret not in said
        assert secret.encode() not in stored(settings)
