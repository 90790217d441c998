"""The clients against the service's OpenAPI document: requests and responses match it."""

import inspect
import re
from contextlib import suppress
from pathlib import Path

import jsonschema_rs
import pytest
from pydantic import BaseModel

from app.main import create_app
from rocket_client import Rocket, _model_upload, models
from rocket_client._download import FileDownload
from rocket_client._wire import Call, Request
from rocket_client.models import Artifact

HOOK = "hook_" + "0" * 26
JOB, PROFILE, UPLOAD = "job_" + "0" * 26, "prof_" + "0" * 26, "upload/" + "0" * 32
TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
CALIBRATION = {"dataset": "builtin", "samples": 3, "sequence_length": 64, "seed": 1}
EVALUATE = {"dataset": "builtin", "samples": 2, "sequence_length": 8, "stride": 4, "tasks": ["piqa"], "task_items": 9}
EVALUATE |= {"prompts": ["a"], "answer_tokens": 3}
OPTIONS = {"preset": "fast", "objective": "fisher", "method": "rocket", "ignore": ["*.q"], "export": ["dense"]}
JOB_REQUEST = {
    "ratio": 0.3,
    "calibration": CALIBRATION,
    "evaluate": EVALUATE,
    "accept": {"max_kl": 0.05, "max_perplexity_increase": 0.02, "max_task_drop": 0.01},
    "benchmark": True,
    "options": OPTIONS,
    "revision": "main",
}

# For each method that calls the server one call, or several if there are several ways to call it.
METHODS = {
    "submit": [
        {"model_id": "local/tiny", "ratio": 0},
        {"model_id": "a/b", "metadata": {"k": "v"}, "queue": "cpu", "hub_token": "t", "idempotency_key": "k"}
        | JOB_REQUEST,
        {"model_id": "a/b", "ratio": 0.3, "evaluate": {}},
        {"model_id": "a/b", "target_bytes": 10**9},
        {"model_id": "a/b", "bits": 4.5},
        {"model_id": "a/b", "fit": {"memory_bytes": 10**9, "context": 100, "batch": 2, "kv_bits": 8}},
        {"model_id": "a/b", "max_kl": 0.1},
        {"model_id": "a/b", "max_perplexity_increase": 0.1},
    ],
    "profile": [
        {"model_id": "local/tiny"},
        {"model_id": "a/b", "metadata": {"k": "v"}, "queue": "cpu", "hub_token": "t", "idempotency_key": "k"}
        | {"calibration": CALIBRATION, "options": OPTIONS, "revision": "main"},
    ],
    "heal": [
        {"job_id": JOB, "tokens": 5},
        {"job_id": JOB, "tokens": 5, "metadata": {"k": "v"}, "queue": "cpu", "hub_token": "t", "idempotency_key": "k"}
        | {"calibration": {"dataset": "ptb", "sequence_length": 8, "seed": 1}},
    ],
    "estimate": [
        {"model_id": "local/tiny", "ratio": 0.3},
        {"model_id": "local/tiny", "target_bytes": 10**9},
        {"model_id": "local/tiny", "bits": 4.5},
        {"model_id": "local/tiny", "fit": {"memory_bytes": 10**9, "context": 100}},
        {"model_id": "local/tiny", "max_kl": 0.1},
        {"model_id": "local/tiny", "max_perplexity_increase": 0.1},
        {"model_id": "a/b", "hub_token": "t"} | JOB_REQUEST,
    ],
    "upload": [{"file": Path("a.txt")}, {"file": Path("a.jsonl")}],
    "get_upload": [{"upload_id": UPLOAD}],
    "delete_upload": [{"upload_id": UPLOAD}],
    # Announces the model first; the requests that follow are in `upload_requests`.
    "upload_model": [{"folder": TINY_LLAMA, "name": "mine"}],
    "delete_model": [{"model_id": "upload/mine"}],
    "list_models": [{}],
    "get_job": [{"job_id": JOB}],
    "wait": [{"job_id": JOB}],
    "list_jobs": [{}, {"status": "failed", "metadata": {"k": "v"}, "after": JOB, "limit": 3}],
    "iterate_jobs": [{}],
    "cancel": [{"job_id": JOB}],
    "retry": [{"job_id": JOB}, {"job_id": JOB, "hub_token": "t"}],
    "evaluate": [
        {"job_id": JOB},
        {"job_id": JOB, "settings": EVALUATE, "hub_token": "t", "idempotency_key": "k"},
    ],
    "evaluations": [{"job_id": JOB}],
    "export": [
        {"job_id": JOB, "to": "gguf"},
        {"job_id": JOB, "to": "dense", "metadata": {"k": "v"}, "queue": "cpu", "idempotency_key": "k"},
    ],
    "exports": [{"job_id": JOB}],
    "push": [
        {"job_id": JOB, "repository": "a/b"},
        {"job_id": JOB, "repository": "a/b", "hub_token": "t", "idempotency_key": "k"}
        | {"settings": {"private": True, "export": "gguf", "metadata": {"k": "v"}, "queue": "cpu"}},
    ],
    "pushes": [{"job_id": JOB}],
    "create_link": [{"job_id": JOB}, {"job_id": JOB, "with_files": True}],
    "get_link": [{"job_id": JOB}],
    "delete_link": [{"job_id": JOB}],
    "delete": [{"job_id": JOB}],
    "events": [{"job_id": JOB, "after": 3}],
    "layers": [{"job_id": JOB}],
    "list_profiles": [{}, {"after": PROFILE, "limit": 3}],
    "get_profile": [{"profile_id": PROFILE}],
    "frontier": [{"profile_id": PROFILE}],
    "allocate": [
        {"profile_id": PROFILE} | wanted for wanted in ({"ratio": 0}, {"model_bytes": 9}, {"bits": 4.5}, {"error": 0.1})
    ],
    "delete_profile": [{"profile_id": PROFILE}],
    "report": [{"job_id": JOB}],
    "artifacts": [{"job_id": JOB}],
    # Requests the list first; the files that it requests next are in `FILE`.
    "download": [{"job_id": JOB, "folder": Path("out")}],
    "models": [{}],
    "create_webhook": [
        {"url": "https://example.org"},
        {"url": "https://example.org", "events": ["job.failed"]},
    ],
    "list_webhooks": [{}],
    "get_webhook": [{"webhook_id": HOOK}],
    "delete_webhook": [{"webhook_id": HOOK}],
    "test_webhook": [{"webhook_id": HOOK}],
    "calibrations": [{}],
}
ASKING_NOTHING = {"server", "close"}

# Operations of the document that no client method uses.
NO_METHOD = {
    "GET /healthz": "for whoever runs the service, like the next two; a client notices by itself",
    "GET /readyz": "as above",
    "GET /metrics": "for Prometheus, in its own format",
}
NOT_SENT = {
    ("POST /jobs", "prefer"): "a job is followed by its events, which tell what happens meanwhile",
    ("POST /profiles", "prefer"): "as above",
    ("POST /jobs/{job_id}/healings", "prefer"): "as above",
    ("POST /jobs/{job_id}/evaluations", "prefer"): "as above",
    ("POST /jobs/{job_id}/exports", "prefer"): "as above",
    ("POST /jobs/{job_id}/pushes", "prefer"): "as above",
    ("GET /jobs/{job_id}", "prefer"): "as above",
    ("GET /jobs/{job_id}/events", "after"): "the header Last-Event-ID says the same of a stream",
    ("GET /jobs/{job_id}/events", "limit"): "of pages; the client reads streams",
}
# Where the document allows what a response to the client's own calls never has.
NARROWER = {
    f"Upload.{member}: {difference}": "only of what the server offers by itself, which is asked for by name"
    for member in ("size", "documents", "sha256")
    for difference in ("null", "not always sent")
}


class EventPage(BaseModel):
    data: tuple[models.Event, ...]


# Models of responses to requests that are not a `Call`.
READ = {
    "GET /jobs/{job_id}/events": EventPage,
    "GET /jobs/{job_id}/artifacts/{name}": None,
    "DELETE /jobs/{job_id}": None,
    "DELETE /jobs/{job_id}/link": None,
    "DELETE /profiles/{profile_id}": None,
    "DELETE /calibrations/{upload_id}": None,
    "DELETE /models/{model_name}": None,
    "DELETE /webhooks/{webhook_id}": None,
}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    from app.shared.settings import Settings

    return create_app(Settings(data_dir=tmp_path_factory.mktemp("data"))).openapi()


class Asked(BaseException):
    """Stands in for the network: every request ends there."""


def requests_of(connect, method, arguments, monkeypatch):
    sent = []

    def record(request):
        sent.append(request)
        raise Asked

    monkeypatch.setattr(Request, "arguments", record)
    with connect("http://127.0.0.1:1") as client, suppress(Asked):
        # Iterators send their request at the first step.
        list(getattr(client, method)(**arguments))
    return sent


def file_request():
    artifact = Artifact(name="rocket/a.json", size=9, sha256="0" * 64, media_type="")
    url = f"/jobs/{JOB}/artifacts/{artifact.name}"
    return FileDownload(None, url, artifact, Path("a.json"), 1)._http_request(3)


def upload_requests():
    yield _model_upload.check_model("mine")
    yield _model_upload.save_piece("mine", "config.json", b"{}", start=0, total=2, digest="sha-256=::")
    yield _model_upload.get_model("mine")
    yield _model_upload.get_file("mine", "config.json")


def operation_of(document, request):
    """Return the document's name of a request, and its operation."""
    fitting = [
        (f"{request.method} {path}", methods[request.method.lower()])
        for path, methods in document["paths"].items()
        if request.method.lower() in methods
        and re.fullmatch(
            re.sub(r"\\\{(name|file)\\\}", ".+", re.sub(r"\\\{\w+_(?:id|name)\\\}", "[^/]+", re.escape(path))),
            request.path,
        )
    ]
    assert fitting, f"{request.method} {request.path} is not in the document"
    return fitting[0]


def requests(connect, monkeypatch):
    for method, ways in METHODS.items():
        for arguments in ways:
            yield from requests_of(connect, method, arguments, monkeypatch)
            monkeypatch.undo()
    yield file_request()
    yield from upload_requests()


def test_every_method_of_the_client_is_covered():
    methods = {name for name in dir(Rocket) if not name.startswith("_")}
    assert set(METHODS) == methods - ASKING_NOTHING
    for method, ways in METHODS.items():
        told = {"patience", "on_news", "on_progress", "exports"}
        parameters = set(inspect.signature(getattr(Rocket, method)).parameters) - {"self"} - told
        is_list = method == "iterate_jobs"
        assert is_list or parameters == {name for arguments in ways for name in arguments}, method


@pytest.mark.both_clients
def test_every_documented_operation_has_a_method(document, connect, monkeypatch):
    asked = {operation_of(document, request)[0] for request in requests(connect, monkeypatch)}
    offered = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}

    assert asked.isdisjoint(NO_METHOD)
    assert asked | set(NO_METHOD) == offered


@pytest.mark.both_clients
def test_every_documented_parameter_can_be_sent(document, connect, monkeypatch):
    sent, offered = set(), set()
    for request in requests(connect, monkeypatch):
        name, operation = operation_of(document, request)
        known = {
            parameter["name"].lower() for parameter in operation.get("parameters", ()) if parameter["in"] != "path"
        }
        headers = {header.lower() for header in request.headers}
        query = {parameter.partition("[")[0] for parameter in request.params}
        assert query <= known, name
        sent |= {(name, parameter) for parameter in query | headers}
        offered |= {(name, parameter) for parameter in known}

    assert offered - sent == set(NOT_SENT)
    own = {parameter for name, parameter in sent - offered}
    # HTTP's own headers, which a document need not name.
    assert own <= {"accept", "accept-encoding", "cache-control", "content-type", "range", "if-range"}


@pytest.mark.both_clients
def test_every_request_body_matches_the_document(document, connect, monkeypatch):
    seen = set()
    for request in requests(connect, monkeypatch):
        name, operation = operation_of(document, request)
        content = operation.get("requestBody", {}).get("content", {})
        if request.file is not None or request.content is not None:
            assert request.headers["Content-Type"] in content
        elif content or request.json is not None:
            seen.add(name)
            schema = content["application/json"]["schema"]
            whole = {"allOf": [schema], "components": document["components"]}
            errors = jsonschema_rs.Draft202012Validator(whole).iter_errors(request.json)
            assert [str(error) for error in errors] == [], name
    assert seen == {
        "POST /models",
        "POST /webhooks",
        "POST /jobs",
        "POST /jobs/{job_id}/healings",
        "POST /jobs/{job_id}/evaluations",
        "POST /jobs/{job_id}/exports",
        "POST /jobs/{job_id}/pushes",
        "POST /jobs/{job_id}/link",
        "POST /profiles",
        "POST /estimates",
        "POST /profiles/{profile_id}/allocations",
    }


def test_every_member_the_client_reads_is_in_the_document(document, monkeypatch):
    found, read, answers = [], set(), set()
    for request in requests(Rocket, monkeypatch):
        answers |= {request.answer.__name__} if isinstance(request, Call) else set()
        name, operation = operation_of(document, request)
        kind = request.answer if isinstance(request, Call) else READ[name]
        for status, answer in operation["responses"].items():
            content = answer.get("content", {}) if status.startswith("2") else {}
            if kind is None or "application/json" not in content:
                continue
            read.add(kind.__name__)
            taken = kind.model_json_schema(mode="validation")
            found += Comparison(taken, document).differences(
                taken, content["application/json"]["schema"], kind.__name__
            )

    assert set(found) == set(NARROWER)
    assert read == answers | {"EventPage"}


def test_progress_has_the_types_of_the_job(document):
    taken = models.Progress.model_json_schema()
    job = {"$ref": "#/components/schemas/JobView"}

    assert list(Comparison(taken, document).differences(taken, job, "Progress")) == []
    events = document["paths"]["/jobs/{job_id}/events"]["get"]["responses"]["200"]["content"]
    assert "text/event-stream" in events


class Comparison:
    """Comparison of what a service may send with what a client accepts, each a JSON schema with definitions."""

    def __init__(self, taken, sent):
        self._taken, self._sent = taken, sent

    def differences(self, taken, sent, where):
        taken, sent = resolved(self._taken, taken), resolved(self._sent, sent)
        for choice in choices(self._sent, sent):
            fitting = [
                option for option in choices(self._taken, taken) if types(choice) <= types(option) | integers(option)
            ]
            if not fitting:
                yield f"{where}: {', '.join(sorted(types(choice)))}"
                continue
            yield from min((list(self._within(option, choice, where)) for option in fitting), key=len)

    def _within(self, taken, sent, where):
        if "format" in taken and taken["format"] != sent.get("format"):
            yield f"{where}: format {taken['format']}"
        if "enum" in taken and not set(sent.get("enum", [sent.get("const")])) <= set(taken["enum"]):
            yield f"{where}: values"
        if "items" in taken:
            yield from self.differences(taken["items"], sent["items"], f"{where}[]")
        for name, member in taken.get("properties", {}).items():
            if name not in sent.get("properties", {}):
                yield f"{where}.{name}: missing"
                continue
            told = sent["properties"][name]
            if name in taken.get("required", ()) and name not in sent.get("required", ()) and "default" not in told:
                yield f"{where}.{name}: not always sent"
            yield from self.differences(member, told, f"{where}.{name}")
        if isinstance(taken.get("additionalProperties"), dict):
            members = list(sent.get("properties", {}).values())
            further = sent.get("additionalProperties")
            for member in [*members, *([further] if isinstance(further, dict) else [])]:
                yield from self.differences(taken["additionalProperties"], member, f"{where}.*")


ALL_TYPES = {"string", "integer", "number", "boolean", "null", "array", "object"}


def types(schema):
    """Return the JSON types that a schema allows; all if it names none."""
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    named = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {"string"} if named and all(isinstance(value, str) for value in named) else ALL_TYPES


def integers(schema):
    return {"integer"} if "number" in types(schema) else set()


def resolved(document, schema):
    while "$ref" in schema:
        place = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        schema = place
    return schema


def choices(document, schema):
    """Return the schemas of which one applies."""
    schema = resolved(document, schema)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options is None:
        return [schema]
    return [choice for option in options for choice in choices(document, option)]


@pytest.mark.parametrize(
    ("taken", "sent", "difference"),
    [
        ({"type": "number"}, {"type": "integer"}, None),
        ({"type": "integer"}, {"type": "number"}, "X: number"),
        ({"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "X: null"),
        ({}, {"type": "array"}, None),
        ({"type": "string", "format": "date-time"}, {"type": "string"}, "X: format date-time"),
        (
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
            "X[]: integer",
        ),
        ({"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {}}, "X.a: missing"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"type": "string"}}},
            "X.a: not always sent",
        ),
        ({"enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}, "X: values"),
    ],
)
def test_differences_are_detected(taken, sent, difference):
    assert list(Comparison(taken, sent).differences(taken, sent, "X")) == ([] if difference is None else [difference])
