import json
import re

import pytest

from app.shared.repositories import outputs, works
from tests.app.api.conftest import BODY
from tests.app.api.routes.test_evaluations import REPORT
from tests.reference.reports import report_of_layers

pytestmark = pytest.mark.databases("sqlite", "postgres")

MODEL = "/ui/model?id=local/tiny"
FILES = {"rocket/model.safetensors": b"1"}


@pytest.fixture
def measure(client, worker):
    """Return the id of a job that has succeeded, with the evaluation in its report, and one later."""

    def measure(own, later=None):
        job_id = client.post("/jobs", json=BODY).json()["id"]
        worker.report = report_of_layers().model_copy(update={"evaluation": own})
        worker.succeed(job_id, FILES)
        if later is not None:
            evaluating = client.post(f"/jobs/{job_id}/evaluations", json={}).json()["id"]
            lease = worker.claim(evaluating)
            worker.do(works.save_report, lease, later)
            worker.do(outputs.succeed_without_files, lease)
        return job_id

    return measure


def figure_of(text):
    return json.loads(re.search(r'data-figure="quality-over-size".*?json">(.*?)</script>', text, flags=re.DOTALL)[1])


def test_a_model_shows_what_its_jobs_have_measured(page, client, measure):
    assert "No job of this model was evaluated" in page("GET", MODEL).text
    measure(None)
    again = REPORT.model_copy(update={"tokens": 31})
    other = REPORT.model_copy(update={"text_sha256": "1" * 64})
    one, two = measure(REPORT), measure(REPORT, again)
    three = measure(None, other)
    client.post("/jobs", json=BODY)

    text = page("GET", MODEL).text
    points = [(row["address"], row["kl_divergence"], row["text"]) for row in figure_of(text)["rows"]]
    texts = ["builtin, 30 tokens, 000000", "builtin, 31 tokens, 000000", "builtin, 30 tokens, 111111"]
    assert sorted(points) == sorted(
        (f"/ui/jobs/{job_id}", 0.5, text) for job_id, text in zip((one, two, three), texts, strict=True)
    )
    assert text.count("perplexity 2.7 → 7.4") == 3
    data = page("GET", "/ui/model/figures/quality-over-size.csv?id=local/tiny")
    assert data.text.splitlines()[0] == "name,model_bytes,kl_divergence,perplexity_ratio,text"
    assert len(data.text.splitlines()) == 4
    assert page("GET", "/ui/model/figures/other.csv?id=local/tiny").status_code == 404
    assert f'href="{MODEL}"' in page("GET", f"/ui/jobs/{one}").text


def test_the_comparison_marks_its_jobs_among_all(page, measure):
    one, two = measure(REPORT), measure(REPORT)
    rows = figure_of(page("GET", f"/ui/compare?job={one}").text)["rows"]
    assert {row["address"]: row["is_marked"] for row in rows} == {f"/ui/jobs/{one}": True, f"/ui/jobs/{two}": False}
    assert "quality-over-size" not in page("GET", "/ui/compare").text
