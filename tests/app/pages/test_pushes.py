"""Push to Hub on a finished job's page: the form, and what became of the pushes."""

import re

import pytest
from huggingface_hub import constants

from app.shared.encryption import decrypt
from app.shared.models import Job
from app.shared.outcomes import JobError
from app.shared.repositories import outputs, works
from rocket_core.report.push import PushReport
from tests.reference.reports import report_of_layers

FILES = {"rocket/model.safetensors": b"weights", "rocket/config.json": b"{}", "report.json": b"{}"}
REPO, TOKEN = "alice/small", "hf_canary0123456789"
FILLED = {"repository": REPO, "hub_token": TOKEN, "form": "f"}
PUSHED = PushReport(
    repository=REPO, url=f"https://hub/{REPO}", commit="c0ffee" * 4, is_new=True, export="rocket", files=2, size=9
)
BROKEN = JobError(code="hub_forbidden", message="the token may not write to alice/small")


@pytest.fixture(autouse=True)
def _no_own_token(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))


@pytest.fixture
def finished(submitted, worker):
    worker.report = report_of_layers()
    worker.succeed(submitted, FILES)
    return submitted


def test_a_finished_job_offers_a_push(page, finished):
    text = page("GET", f"/ui/jobs/{finished}").text
    form = re.search(rf'action="/ui/jobs/{finished}/pushes".*?</form>', text, re.DOTALL)[0]
    assert re.search(r'<input type="password" id="hub_token" name="hub_token" required[^>]* autocomplete="off"', form)
    assert 'name="export"' not in form, "there is only one"
    assert f"rocket push-job {finished} NAMESPACE/NAME --hub-token-env HF_TOKEN --watch" in text


def test_several_exports_are_a_choice(page, submitted, worker):
    worker.report = report_of_layers()
    worker.succeed(submitted, FILES | {"dense/model.safetensors": b"w"})
    text = page("GET", f"/ui/jobs/{submitted}").text
    assert '<select id="push-export" name="export"><option>rocket</option><option>dense</option></select>' in text


def test_a_server_with_a_token_does_not_ask_for_one(page, finished, monkeypatch, client):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = page("GET", f"/ui/jobs/{finished}").text
    assert "the server uses its own" in text
    assert TOKEN not in text
    assert page("POST", f"/ui/jobs/{finished}/pushes", data={"repository": REPO}).status_code == 303
    assert len(client.get(f"/jobs/{finished}/pushes").json()["data"]) == 1


def test_a_job_is_pushed_and_listed_on_the_page(page, client, context, finished, worker, settings):
    for _ in range(2):
        # Pressing twice makes one job.
        answer = page("POST", f"/ui/jobs/{finished}/pushes", data=FILLED | {"private": "yes"})
        assert answer.headers["Location"] == f"/ui/jobs/{finished}#push"
    ((job, _),) = (push.values() for push in client.get(f"/jobs/{finished}/pushes").json()["data"])
    assert job["push"] == {"repository": REPO, "private": True, "export": "rocket"}
    with context.database.snapshot() as session:
        assert decrypt(settings, session.get_one(Job, job["id"]).hub_token).get_secret_value() == TOKEN
    assert "hx-get" in page("GET", f"/ui/jobs/{finished}/pushes").text
    lease = worker.claim(job["id"])
    worker.do(works.save_report, lease, PUSHED)
    worker.do(outputs.succeed_without_files, lease)
    texts = [page("GET", f"/ui/jobs/{finished}{part}").text for part in ("/pushes", "")]
    for text in texts:
        assert f'<a href="{PUSHED.url}" rel="noopener noreferrer">{REPO}</a>' in text
        assert TOKEN not in text
    assert "hx-get" not in texts[0]
    own = page("GET", f"/ui/jobs/{job['id']}").text
    assert PUSHED.url in own
    assert "an earlier job" in own
    assert "sending the files" not in own


def test_a_failed_push_says_why_and_leads_back(page, client, finished, worker):
    page("POST", f"/ui/jobs/{finished}/pushes", data=FILLED)
    job_id = client.get(f"/jobs/{finished}/pushes").json()["data"][0]["job"]["id"]
    worker.fail(job_id, BROKEN)
    assert BROKEN.message in page("GET", f"/ui/jobs/{finished}/pushes").text
    own = page("GET", f"/ui/jobs/{job_id}").text
    assert f'href="/ui/jobs/{finished}#push">Push again' in own
    assert "Retry from checkpoints" not in own


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"repository": "small"}, "write the repository as NAMESPACE/NAME"),
        ({"hub_token": ""}, "enter a Hub token with write access"),
        ({"hub_token": "canary"}, "it must start with hf_"),
        ({"export": "onnx"}, "choose one of the exports of this job"),
        ({"export": "gguf"}, "the job has no export gguf; it has rocket"),
    ],
)
def test_invalid_fields_are_explained_and_not_repeated(page, client, finished, changes, advice):
    answer = page("POST", f"/ui/jobs/{finished}/pushes", data=FILLED | changes)
    assert answer.status_code == 422
    assert advice in answer.text
    assert "canary" not in answer.text
    assert client.get(f"/jobs/{finished}/pushes").json()["data"] == []


def test_an_unfinished_job_offers_no_push(page, submitted):
    assert "Push to Hub" not in page("GET", f"/ui/jobs/{submitted}").text
