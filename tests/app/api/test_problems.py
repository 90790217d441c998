import inspect
import io
import json
import logging
import re

import pytest
from sqlalchemy import text

from app.api.ids import FORMS
from app.api.problems import _message, status_of
from app.shared import errors
from app.shared.logging import configure_logging
from app.shared.settings import Settings
from rocket_core import errors as core_errors
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.AppError)]
CORE = [kind for kind in vars(core_errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
STATUSES = {
    401: {"unauthenticated"},
    403: {"permission_denied"},
    404: {
        "artifact_not_found",
        "job_not_found",
        "link_not_found",
        "model_upload_not_found",
        "not_found",
        "profile_not_found",
        "upload_not_found",
        "webhook_not_found",
    },
    409: {"fenced_out", "job_state_conflict", "model_not_ready", "model_upload_conflict", "report_not_ready"},
    410: {"artifact_expired"},
    422: {"idempotency_key_reused", "invalid_request", "over_quota"},
    429: {"quota_exceeded", "rate_limited", "too_many_streams", "too_many_uploads"},
    500: {"app_error", "data_folder_locked", "invalid_settings", "job_stalled", "storage_error", "worker_lost"},
    503: {"busy", "database_unavailable", "queue_unavailable", "storage_unavailable"},
    507: {"disk_full"},
}
CANARY = "canary-hunter2"


def test_every_error_of_the_service_has_its_status():
    by_status = {}
    for kind in KINDS:
        by_status.setdefault(status_of(kind).value, set()).add(kind.code)
    assert by_status == STATUSES


def test_errors_of_the_library_map_to_422_or_503():
    assert {status_of(kind).value for kind in CORE if kind.__module__ == core_errors.__name__} == {422, 503}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if status_of(kind).value in {500, 507}])
def test_service_failure_is_described_to_users_and_logged(kind, app, caplog):
    def fail():
        raise kind(f"cannot write /srv/{CANARY}")

    app.router.add_api_route("/failing", fail)
    with local_client(app) as client:
        answer = client.get("/failing")
    detail = answer.json()["detail"]
    assert answer.status_code == status_of(kind).value
    assert CANARY not in answer.text
    assert CANARY in caplog.text
    # What is wrong; what to do.
    assert "; " in detail
    assert detail not in inspect.getdoc(kind)


def test_retryable_errors_map_to_429_or_503():
    passing = {kind for kind in [*KINDS, *CORE] if getattr(kind, "retryable", False)}
    assert {status_of(kind).value for kind in passing} <= {429, 503}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("PUT", "/jobs", 405, "method_not_allowed"),
        ("GET", "/jobs/x", 404, "job_not_found"),
        ("GET", "/jobs/job_" + "0" * 26, 404, "job_not_found"),
        ("POST", "/jobs", 422, "invalid_request"),
    ],
)
def test_every_error_is_a_problem_document(client, method, path, status, code):
    answer = client.request(method, path)
    problem = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert problem["type"] == f"urn:rocket:error:{code}"
    assert problem["title"]
    assert problem["detail"]
    assert problem["request_id"] == answer.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/jobs", "job_"), ("/profiles", "prof_"), ("/ui/jobs", "job_"), ("/ui/profiles", "prof_")],
)
def test_a_malformed_id_is_refused_with_its_expected_form(client, path, kind):
    for sent in (CANARY, "job_%00", "prof_" + "O" * 26):
        answer = client.get(f"{path}?after={sent}")
        problem = answer.json()
        assert (answer.status_code, problem["param"]) == (422, "query.after")
        assert f"such as {kind}0123456789abcdefghjkmnpqrs" in problem["detail"]
        assert "GET /" in problem["detail"]
        assert not {"^", "[0-9", sent} & {part for part in ("^", "[0-9", sent) if part in answer.text}


def test_every_pattern_in_the_schema_has_a_description(app):
    asked = set()

    def look(part):
        if isinstance(part, dict):
            asked.update([part["pattern"]] if isinstance(part.get("pattern"), str) else [])
            part = list(part.values())
        for inner in part if isinstance(part, list) else ():
            look(inner)

    look(app.openapi())
    assert asked == set(FORMS)
    assert all(re.search(form, re.search(r"such as (\w+)", words)[1]) for form, words in FORMS.items())
    assert "^x$" not in _message({"type": "string_pattern_mismatch", "msg": "'^x$'", "ctx": {"pattern": "^x$"}})


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/jobs", "GET, POST"), ("/healthz", "GET"), ("/jobs/job_" + "0" * 26, "DELETE, GET")],
)
def test_a_wrong_method_gets_the_allowed_ones(client, path, allowed):
    answer = client.put(path)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == allowed


@pytest.mark.parametrize(
    "body",
    [
        {"model_id": CANARY, "ratio": 0.3},
        {"model_id": f"local/{CANARY}", "ratio": 0.3},
        {"model_id": "local/tiny", "ratio": CANARY},
        {"model_id": "local/tiny", "ratio": 0.3, "hf-Token" + CANARY: "x"},
        {"model_id": "local/tiny", "ratio": 0.3, "token": CANARY},
        {"model_id": "local/tiny", "ratio": 0.3, "metadata": {CANARY: 1}},
        {"model_id": "local/tiny", "ratio": 0.3, "metadata": {"a": [CANARY]}},
        {"model_id": "local/tiny", "ratio": 0.3, "options": {"objective": CANARY}},
        {"model_id": "local/tiny", "ratio": 0.3, "options": {"export": [CANARY]}},
        {"model_id": "local/tiny", "ratio": 0.3, "options": {"ignore": ["*.q_proj", CANARY]}},
        {"model_id": "local/tiny", "ratio": 0.3, "calibration": {"dataset": CANARY}},
        {"model_id": "local/tiny", "ratio": 0.3, "calibration": {"dataset": f"local/{CANARY}"}},
        {"model_id": "a/b", "ratio": 0.3, "revision": "../" + CANARY},
        {"model_id": "local/tiny", "ratio": 0.95, "metadata": {CANARY: CANARY}},
        [CANARY],
        CANARY,
    ],
)
def test_an_invalid_request_is_not_echoed_or_logged(client, body):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    log = io.StringIO()
    configure_logging(Settings(log_level="debug"), log)
    try:
        answer = client.post("/jobs", json=body)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert answer.status_code == 422
    assert CANARY not in answer.text
    assert "status=422" in log.getvalue()
    assert CANARY not in "".join(line for line in log.getvalue().splitlines() if "httpx" not in line)


def test_an_unknown_field_is_named(client):
    answer = client.post("/jobs", json={"model_id": "local/tiny", "ratoi": 0.3})
    assert {problem["param"] for problem in answer.json()["errors"]} == {"ratoi"}


@pytest.mark.parametrize(
    ("content", "status"), [(b"", 422), (b"{", 400), (b"\xff\xfe", 400), (b"[" * 3000, 400), (b'{"ratio": NaN}', 422)]
)
def test_invalid_json_is_refused(client, content, status):
    answer = client.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_body_without_json_content_type_is_refused(client, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/jobs", content=json.dumps(BODY), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    assert "application/json" in answer.json()["detail"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json"])
def test_json_content_types_are_accepted(client, kind):
    assert client.post("/jobs", content=json.dumps(BODY), headers={"Content-Type": kind}).status_code == 202


@pytest.mark.parametrize("value", ["nul\\u0000", "half\\ud800"])
def test_text_that_a_database_cannot_store_is_refused(client, value):
    content = json.dumps(BODY)[:-1] + f', "metadata": {{"a": "{value}"}}}}'
    answer = client.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


def test_oversized_bodies_are_refused_with_or_without_a_length(client):
    large = json.dumps(BODY | {"metadata": {"a": "x" * 5000}}).encode()
    announced = client.post("/jobs", content=large, headers={"Content-Type": "application/json"})
    chunked = client.post(
        "/jobs", content=iter([large[:100], large[100:]]), headers={"Content-Type": "application/json"}
    )
    for answer in (announced, chunked):
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    lying = {"Content-Type": "application/json", "Content-Length": "999999999"}
    assert client.post("/jobs", content=b"{}", headers=lying).status_code == 413


def test_a_body_of_the_maximum_size_is_accepted(client):
    body = json.dumps(BODY).encode()
    padded = body + b" " * (4096 - len(body))
    assert client.post("/jobs", content=padded, headers={"Content-Type": "application/json"}).status_code == 202


def test_an_unavailable_database_is_a_retryable_problem(client, context, monkeypatch):
    def fail():
        raise errors.DatabaseUnavailableError("the database does not answer (x); try again later")

    monkeypatch.setattr(type(context.database), "snapshot", lambda _self: fail())
    answer = client.get("/jobs")
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
    assert int(answer.headers["Retry-After"]) > 0


def test_a_database_error_reveals_no_sql(client, context):
    with context.database.transaction() as session:
        session.execute(text("DROP TABLE artifacts"))
        session.execute(text("ALTER TABLE jobs RENAME TO canary"))
    answer = client.get("/jobs")
    assert answer.status_code in {500, 503}
    assert "canary" not in answer.text
    assert "SELECT" not in answer.text


def test_an_unexpected_exception_is_an_internal_error(client, monkeypatch):
    def explode(*_arguments, **_options):
        raise ZeroDivisionError("canary")

    monkeypatch.setattr("app.services.jobs.list_jobs", explode)
    answer = client.get("/jobs", headers={"X-Request-Id": "my-request"})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.headers["X-Request-Id"] == answer.json()["request_id"] == "my-request"
    assert "canary" not in answer.text


@pytest.mark.parametrize(("sent", "kept"), [("my-request-1", True), ("x" * 65, False), ("a b", False)])
def test_only_a_valid_request_id_is_echoed(client, sent, kept):
    answer = client.get("/healthz", headers={"X-Request-Id": sent})
    assert (answer.headers["X-Request-Id"] == sent) == kept
