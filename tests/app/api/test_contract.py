"""Requests generated from the OpenAPI document, valid and invalid, and the responses that it promises."""

import json
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from hypothesis import settings as profile_settings

from app.shared.models import LOCAL_OWNER
from app.shared.outcomes import JobError
from app.shared.repositories import keys
from tests.app.api.conftest import BODY
from tests.reference.fake_hub import FakeHub

SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
CONFIGURATION = """
# Most of what is well-formed asks for models that do not exist.
[checks]
positive_data_acceptance.enabled = false

[dictionaries.jobs]
values = {job_ids}

[parameters]
"path.job_id" = {{ dictionary = "jobs", probability = 0.8 }}
"path.name" = {{ dictionary = "names", probability = 0.8 }}

[dictionaries.names]
values = ["model.safetensors"]

# `metadata[a][b]=c` is no text in an object to the document, and a label named `a][b` to the service.
[[operations]]
include-name = "GET /jobs"
checks.negative_data_rejection.enabled = false
"""


@pytest.fixture
def settings(settings):
    """Return a service without the limits that so many requests would hit."""
    rates = {"rate_limit": "1000000/second", "submit_rate_limit": "1000000/second"}
    quotas = {"max_active_jobs": 10**6, "max_uploads": 10**6, "max_body_bytes": 2**20}
    return settings.model_copy(update=quotas | rates)


@pytest.fixture
def job_ids(url, worker):
    """Return jobs in every state."""

    def submitted():
        return httpx2.post(f"{url}/jobs", json=BODY).json()["id"]

    _queued, running, failed, cancelled, succeeded = made = [submitted() for _ in range(5)]
    worker.claim(running)
    worker.fail(failed, JobError(code="x", message="m"))
    httpx2.post(f"{url}/jobs/{cancelled}/cancel")
    worker.succeed(succeeded, {"model.safetensors": b"0123456789"})
    return made


@pytest.fixture
def api_key(job_ids, context):
    """Return a key of the tenant that these jobs belong to, so that requests without one are seen to be refused."""
    with context.database.transaction() as session:
        return keys.create_key(session, LOCAL_OWNER, scopes=keys.SCOPES).text


@pytest.fixture
def document(app, tmp_path):
    """Return the OpenAPI document without the responses that report a failure of the service."""
    promised = json.loads(json.dumps(app.openapi()))
    for item in promised["paths"].values():
        for operation in item.values():
            del operation["responses"]["default"]
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(promised))
    return file


def test_every_response_conforms_to_the_openapi_document(url, job_ids, api_key, document, tmp_path, monkeypatch):
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION.format(job_ids=json.dumps(job_ids)))
    # 3 of each operation by default. `pytest --hypothesis-profile soak` runs more, and each constraint's limits.
    examples = max(1, profile_settings().max_examples // 33)
    phases = "examples,fuzzing,stateful" if examples <= 3 else "examples,coverage,fuzzing,stateful"
    options = [
        *("--url", url, "--seed", "1", "--generation-deterministic", "--max-examples", str(examples)),
        *("--phases", phases),
        *("--header", f"Authorization: Bearer {api_key}", "--continue-on-failure"),
    ]
    with FakeHub() as hub:
        hub.replace_the_hub(monkeypatch)
        command = [SCHEMATHESIS, "run", document, *options]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
