"""The formats that a finished job's page offers, and what becomes of them."""

import json
import re

import pytest

from app.shared.outcomes import JobError
from tests.reference.reports import report_of_layers

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}).encode()
BROKEN = JobError(code="x", message="the disk is full")
FILES = {"rocket/model.safetensors": b"weights", "rocket/config.json": CONFIG}


@pytest.fixture
def finished(submitted, worker):
    worker.report = report_of_layers()
    worker.succeed(submitted, FILES)
    return submitted


def test_a_page_offers_what_is_accepted(page, finished):
    text = page("GET", f"/ui/jobs/{finished}").text
    assert re.findall(r'name="to" value="([a-z-]+)"', text) == ["dense"]
    assert "Not gguf, nor compressed-tensors" in text
    assert "no equal in it" in text


def test_a_format_is_made_and_listed_on_the_page(page, client, finished, worker):
    for _ in range(2):
        # Pressing twice makes one job.
        answer = page("POST", f"/ui/jobs/{finished}/exports", data={"to": "dense", "form": "f"})
        assert answer.headers["Location"] == f"/ui/jobs/{finished}#exports"
    (made,) = client.get(f"/jobs/{finished}/exports").json()["data"]
    waiting = page("GET", f"/ui/jobs/{finished}/exports").text
    assert "hx-get" in waiting
    assert 'value="dense"' not in waiting
    worker.succeed(made["id"], {"dense/model.safetensors": b"weights"})
    text = page("GET", f"/ui/jobs/{finished}/exports").text
    assert f'href="/ui/jobs/{made["id"]}/download/dense.tar"' in text
    assert "hx-get" not in text
    assert "an earlier job" in page("GET", f"/ui/jobs/{made['id']}").text


def test_a_failed_export_says_why_and_is_offered_again(page, client, finished, worker):
    page("POST", f"/ui/jobs/{finished}/exports", data={"to": "dense"})
    (made,) = client.get(f"/jobs/{finished}/exports").json()["data"]
    worker.fail(made["id"], BROKEN)
    text = page("GET", f"/ui/jobs/{finished}/exports").text
    assert BROKEN.message in text
    assert 'value="dense"' in text


def test_a_format_that_is_none_is_refused(page, finished):
    answer = page("POST", f"/ui/jobs/{finished}/exports", data={"to": "onnx"})
    assert answer.status_code == 422
    assert "choose dense, gguf or compressed-tensors" in answer.text
