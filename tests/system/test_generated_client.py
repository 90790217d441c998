"""A client that another program generates from the OpenAPI document, in an environment with nothing of Rocket."""

import hashlib
import json
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.e2e.service_process import Service
from tests.reference.tiny_models import save_tiny_model

pytestmark = pytest.mark.system

# It needs versions of httpx and typer that Rocket's environment does not allow.
GENERATOR = "openapi-python-client==0.29.1"
PROGRAM = Path(__file__).parent / "programs" / "use_client.py"


@pytest.fixture
def service(tmp_path):
    save_tiny_model("llama", tmp_path / "data" / "models" / "tiny")
    service = Service(tmp_path / "data")
    yield service
    service.close()


def run(*command, folder):
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_generated_client_submits_waits_and_downloads(service, tmp_path):
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", GENERATOR, folder=tmp_path)
    document = tmp_path / "openapi.json"
    document.write_bytes(service.client.get("/openapi.json").raise_for_status().content)
    generate = [python.with_name("openapi-python-client"), "generate", "--path", document, "--meta", "none"]
    run(*generate, "--output-path", "generated", folder=tmp_path)
    run(python, "-W", "error", "-m", "compileall", "-q", "generated", folder=tmp_path)
    # Next to the client, which its interpreter would not find otherwise.
    shutil.copy(PROGRAM, tmp_path)
    answer = json.loads(run(python, PROGRAM.name, service.url, tmp_path / "out", folder=tmp_path))
    assert (answer["status"], answer["report_version"]) == ("succeeded", 1)
    artifacts = service.client.get(f"/jobs/{answer['id']}/artifacts").json()["data"]
    assert {"rocket/model.safetensors", "report.json"} < {artifact["name"] for artifact in artifacts}
    for artifact in artifacts:
        assert hashlib.sha256((tmp_path / "out" / artifact["name"]).read_bytes()).hexdigest() == artifact["sha256"]
