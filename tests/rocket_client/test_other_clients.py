"""Third-party clients that resume downloads, wherever the files are."""

import subprocess

import pytest
from huggingface_hub.file_download import http_get

from tests.loopback_service import Service

WEIGHTS = bytes(range(256)) * 4096
CUT = 100_001


@pytest.fixture(params=["local", "s3", "s3, redirected"])
def service(request, service):
    if request.param == "local":
        yield service
        return
    store = request.getfixturevalue("s3_settings") | {"redirect_downloads": request.param == "s3, redirected"}
    elsewhere = Service(service.settings.model_copy(update=store))
    yield elsewhere
    elsewhere.close()


@pytest.fixture
def url(service, server):
    return f"{server.url}/jobs/{service.succeeded({'model.safetensors': WEIGHTS})}/artifacts/model.safetensors"


@pytest.fixture
def partial(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(WEIGHTS[:CUT])
    return file


def test_the_hub_client_resumes_mid_file(url, partial):
    with partial.open("ab") as stream:
        http_get(url, stream, resume_size=CUT, expected_size=len(WEIGHTS))
    assert partial.read_bytes() == WEIGHTS


@pytest.mark.system
def test_curl_resumes_mid_file(url, partial):
    command = ["curl", "-sSfL", "-C", "-", "-w", "%{size_download}", "-o", str(partial), url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == str(len(WEIGHTS) - CUT)
    assert partial.read_bytes() == WEIGHTS
