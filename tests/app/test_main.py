"""Properties of the application as a whole."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from app.main import create_app
from app.shared.settings import Settings

ROOT = Path(__file__).parents[2]
RESIDENT_LIMIT_MIB = 150


@pytest.fixture
def app(tmp_path):
    return create_app(Settings(data_dir=tmp_path / "data"))


def operations(app):
    return {(method, path) for path, item in app.openapi()["paths"].items() for method in item}


def test_the_openapi_document_is_valid(app):
    # Its import takes seconds, in each process that collects this module.
    from openapi_spec_validator import validate

    validate(app.openapi())


def test_operations_are_called_as_their_functions(app):
    found = [operation["operationId"] for item in app.openapi()["paths"].values() for operation in item.values()]
    assert {"submit_job", "get_job", "heal_job", "get_report"} <= set(found)
    assert len(set(found)) == len(found)
    assert all(name.isidentifier() for name in found)


def test_the_api_has_the_documented_paths(app):
    assert operations(app) == {
        ("post", "/jobs"),
        ("get", "/jobs"),
        ("get", "/jobs/{job_id}"),
        ("delete", "/jobs/{job_id}"),
        ("post", "/jobs/{job_id}/cancel"),
        ("post", "/jobs/{job_id}/retry"),
        ("post", "/jobs/{job_id}/healings"),
        ("post", "/jobs/{job_id}/evaluations"),
        ("get", "/jobs/{job_id}/evaluations"),
        ("post", "/jobs/{job_id}/exports"),
        ("get", "/jobs/{job_id}/exports"),
        ("post", "/jobs/{job_id}/pushes"),
        ("get", "/jobs/{job_id}/pushes"),
        ("get", "/jobs/{job_id}/events"),
        ("get", "/jobs/{job_id}/layers"),
        ("get", "/jobs/{job_id}/report"),
        ("post", "/jobs/{job_id}/link"),
        ("get", "/jobs/{job_id}/link"),
        ("delete", "/jobs/{job_id}/link"),
        ("get", "/jobs/{job_id}/artifacts"),
        ("get", "/jobs/{job_id}/artifacts/{name}"),
        ("get", "/profiles"),
        ("post", "/profiles"),
        ("get", "/profiles/{profile_id}"),
        ("delete", "/profiles/{profile_id}"),
        ("get", "/profiles/{profile_id}/frontier"),
        ("post", "/profiles/{profile_id}/allocations"),
        ("get", "/models"),
        ("post", "/models"),
        ("get", "/models/{model_name}"),
        ("get", "/models/{model_name}/files/{file}"),
        ("put", "/models/{model_name}/files/{file}"),
        ("post", "/models/{model_name}/check"),
        ("delete", "/models/{model_name}"),
        ("get", "/webhooks"),
        ("post", "/webhooks"),
        ("get", "/webhooks/{webhook_id}"),
        ("delete", "/webhooks/{webhook_id}"),
        ("post", "/webhooks/{webhook_id}/test"),
        ("get", "/calibrations"),
        ("post", "/calibrations"),
        ("get", "/calibrations/{upload_id}"),
        ("delete", "/calibrations/{upload_id}"),
        ("post", "/estimates"),
        ("get", "/healthz"),
        ("get", "/readyz"),
        ("get", "/metrics"),
    }


def descriptions(document):
    """Yield the description of each operation, parameter, schema and member, with its place in the document."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            place = f"{method.upper()} {path}"
            yield place, operation.get("description")
            for parameter in operation.get("parameters", ()):
                yield f"{place} {parameter['in']} {parameter['name']}", parameter.get("description")
    for name, schema in document["components"]["schemas"].items():
        yield name, schema.get("description")
    waiting = [("", document)]
    while waiting:
        place, part = waiting.pop()
        inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        waiting += [(f"{place}/{key}", value) for key, value in inner]
        # A member may itself be called `properties`; then its name is in the middle.
        if place.endswith("/properties") and not place.endswith("/properties/properties"):
            yield from ((f"{place}/{name}", member.get("description")) for name, member in part.items())


def test_everything_in_the_openapi_document_has_a_description(app):
    said = dict(descriptions(app.openapi()))

    assert len(said) > 500
    assert {place for place, text in said.items() if not text or not text.strip()} == set()
    # A docstring in the library's form is parsed, not shown.
    assert {place for place, text in said.items() if "Attributes:" in text or "Args:" in text} == set()


def test_only_listed_endpoints_are_async(app):
    # Any other asynchronous endpoint would block the whole process while it queries the database.
    routes = [route.original_route for route in iter_route_contexts(app.routes)]
    asynchronous = {
        route.name for route in routes if isinstance(route, APIRoute) and inspect.iscoroutinefunction(route.endpoint)
    }
    sleeping = {"list_events", "get_job", "save_upload", "save_piece"}
    # These wait for a thread of their tenant's share, in which a model is judged.
    sharing = {"submit_job", "heal_job", "evaluate_job", "export_job", "push_job", "check_headers"}
    sharing |= {"make_profile", "make_estimate", "submit", "submit_profile", "preview"}
    # Answers without I/O.
    assert asynchronous == {"is_alive"} | sleeping | sharing


@pytest.mark.slow
def test_the_web_process_is_small_and_has_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from app.main import create_app\n"
        "from app.shared.settings import Settings\n"
        "create_app(Settings(data_dir=Path(sys.argv[1]))).openapi()\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
        # Not getrusage: its peak is inherited from the process that started this one.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "other")]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(result.stdout) / 1024 < RESIDENT_LIMIT_MIB
