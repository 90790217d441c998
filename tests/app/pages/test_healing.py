"""The loss curve on a job's page, and the form that heals its result."""

import json
import re

import pytest

from app.shared.repositories import outputs
from rocket_core.report.healing import HealingPoint
from tests.app.api.conftest import BODY
from tests.reference.reports import report_of_layers

POINTS = [HealingPoint(step=0, tokens=0, held_out=2.0), HealingPoint(step=5, tokens=50, training=1.0)]


@pytest.fixture
def healing(client, worker):
    job_id = client.post("/jobs", json=BODY | {"options": {"heal_tokens": 100}}).json()["id"]
    return job_id, worker.claim(job_id)


def drawn(text):
    found = re.search(r'data-figure="loss-curve".*?<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found.group(1))["rows"]


def test_the_page_draws_the_curve_so_far(page, healing, worker):
    job_id, lease = healing
    assert "Nothing to draw yet" in page("GET", f"/ui/jobs/{job_id}").text
    for point in POINTS:
        worker.do(outputs.save_healing_point, lease, point)
    text = page("GET", f"/ui/jobs/{job_id}").text
    assert drawn(text) == [point.model_dump() for point in POINTS]
    assert f"/ui/jobs/{job_id}/curve?points=2" in text
    assert "50.0%" not in text
    data = page("GET", f"/ui/jobs/{job_id}/figures/loss-curve.csv").text.splitlines()
    assert data == ["step,tokens,training,held_out", "0,0,,2.0", "5,50,1.0,"]


def test_the_curve_is_sent_again_only_with_new_points(page, healing, worker):
    job_id, lease = healing
    worker.do(outputs.save_healing_point, lease, POINTS[0])
    assert page("GET", f"/ui/jobs/{job_id}/curve?points=1").status_code == 204
    worker.do(outputs.save_healing_point, lease, POINTS[1])
    assert len(drawn(page("GET", f"/ui/jobs/{job_id}/curve?points=1").text)) == 2


def test_a_job_that_does_not_heal_has_no_curve(page, submitted):
    assert "Loss curve" not in page("GET", f"/ui/jobs/{submitted}").text
    assert page("GET", f"/ui/jobs/{submitted}/curve").status_code == 204


def test_a_result_is_healed_from_its_page(page, client, worker, submitted):
    worker.report = report_of_layers()
    worker.succeed(submitted, {"rocket/model.safetensors": b"weights"})
    assert 'action="/ui/jobs/' in page("GET", f"/ui/jobs/{submitted}").text
    answer = page("POST", f"/ui/jobs/{submitted}/heal", data={"tokens": "1.5M", "form": "f"})
    assert answer.status_code == 303
    job = client.get(answer.headers["Location"].removeprefix("/ui")).json()
    assert (job["source_job_id"], job["options"]["heal_tokens"]) == (submitted, 1_500_000)
    text = page("GET", answer.headers["Location"]).text
    assert "healed" in text
    assert "factorizing" not in text
    refused = page("POST", f"/ui/jobs/{submitted}/heal", data={"tokens": "many"})
    assert refused.status_code == 422
    assert "500k or 2M" in refused.text


def test_a_form_may_ask_for_healing(page, client):
    fields = {"model_id": "local/tiny", "target": "ratio", "ratio": "0.3", "heal": "2M"}
    answer = page("POST", "/ui/new", data=fields)
    job = client.get(answer.headers["Location"].removeprefix("/ui")).json()
    assert job["options"]["heal_tokens"] == 2_000_000
    refused = page("POST", "/ui/new", data=fields | {"heal": "2 pages"})
    assert "is not a number of tokens" in refused.text
    refused = page("POST", "/ui/new", data=fields | {"engine": "llama.cpp"})
    assert "heal_tokens" in refused.text


def test_the_stages_of_healing_start_with_the_artifact(page, worker, submitted):
    worker.report = report_of_layers()
    worker.succeed(submitted, {"rocket/model.safetensors": b"weights"})
    answer = page("POST", f"/ui/jobs/{submitted}/heal", data={"tokens": "1k", "form": "f"})
    text = page("GET", answer.headers["Location"]).text
    stages = re.findall(r'<li class="pending"><span class="name">([^<]*)', text)
    assert stages == ["fetching the files", "checking the model", "healing the result", "writing the files"]
    assert "heals the result of" in text
