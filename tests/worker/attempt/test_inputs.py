"""Inputs that a job's process fetches: a model of the Hub, perhaps with a token, and an uploaded file."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest
from huggingface_hub import constants, utils
from pydantic import SecretStr

from app.shared.encryption import encrypt
from app.shared.models import Job
from app.shared.repositories import jobs, sources, uploads
from app.shared.repositories.uploads import NewUpload
from app.shared.requests import HealingRequest, JobRequest
from rocket_core.config import STAGES
from rocket_core.hub import cache as hub_cache
from rocket_core.report.schema import CompressionReport
from tests.reference.fake_hub import FakeHub
from tests.reference.tiny_models import save_tiny_model
from tests.worker.threads import ThreadedAttempt as Attempt
from tests.worker.waiting import eventually
from worker.runner import Runner

TOKEN = "hf_canary0123456789"  # noqa: S105 - no real one
QUICK = {
    "model_id": "org/model",
    "calibration": {"samples": 2, "sequence_length": 16},
    "options": {"ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
LINES = "".join(json.dumps({"text": f"line {number} of my own text"}) + "\n" for number in range(40)).encode()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub() as fake:
        fake.replace_the_hub(monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "shared-cache"))
        folder = save_tiny_model("llama", tmp_path / "published")
        fake.repositories["org/model"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        yield fake
        utils.close_session()


@pytest.fixture
def submit_with(settings, database):
    def submit_with(token=None, **changes):
        wanted = JobRequest.model_validate({"ratio": 0.3, **QUICK, **changes})
        encrypted = None if token is None else encrypt(settings, SecretStr(token))
        with database.transaction() as session:
            return jobs.create_job(session, wanted, max_attempts=3, hub_token=encrypted).job.id

    return submit_with


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, *, stop=None):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def uploaded(settings, database):
    """Upload a file of the tenant, as the API stores it."""
    stored = Attempt(settings, database, None, threading.Event())._store.put_stream([LINES], max_bytes=2**20)
    new = NewUpload(storage_key=stored.key, sha256=stored.sha256, size=stored.size, suffix=".jsonl", documents=40)
    with database.transaction() as session:
        return uploads.save_upload(session, "local", new)[0]


def test_a_hub_model_is_downloaded_with_progress(hub, submit_with, attempt, messages, tmp_path):
    job = attempt(submit_with())
    assert job.status == "succeeded"
    assert messages(job.id)[2:4] == ["downloading", "preflight"]
    assert (tmp_path / "shared-cache" / "models--org--model").is_dir()
    assert {token for _, token, _ in hub.asked} == {None}


def test_the_result_of_a_hub_model_is_healed_at_its_commit(hub, submit_with, attempt, database, messages):
    compressed = attempt(submit_with())
    with database.transaction() as session:
        healed = sources.find_source(session, "local", compressed.id, "rocket")
        request = JobRequest.model_validate(compressed.request)
        wanted = HealingRequest(tokens=4000).job_request(compressed.id, request, healed.revision)
        job_id = jobs.create_job(session, wanted, max_attempts=1).job.id
    job = attempt(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    assert len(job.request["revision"]) == 40
    assert [text for text in messages(job_id) if text in STAGES] == ["downloading", "preflight", "healing", "exporting"]


def test_a_model_in_use_is_not_evicted_from_the_cache(hub, submit_with, configure, database, claim, look):
    size = sum(len(content) for content in hub.repositories["org/model"].values())
    hub.repositories["org/other"] = hub.repositories["org/model"]
    limited = configure(hub_cache_bytes=size * 3 // 2)

    def run(job_id):
        Attempt(limited, database, claim(job_id), threading.Event()).run(os.getppid())
        return look(job_id)

    try:
        assert run(submit_with()).status == "succeeded"
        # This process continues to run, so it still holds the model.
        other = run(submit_with(model_id="org/other"))
        assert (other.status, other.attempt) == ("queued", 1)
        hub_cache.release(Path(constants.HF_HUB_CACHE) / "models--org--model")
        other = run(other.id)
        assert other.status == "succeeded"
        assert [path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*")] == ["models--org--other"]
    finally:
        for name in ("model", "other"):
            hub_cache.release(Path(constants.HF_HUB_CACHE) / f"models--org--{name}")


def test_downloads_with_a_token_are_private_to_their_job(hub, submit_with, attempt, tmp_path, work):
    seen = []

    class Watching(threading.Event):
        def is_set(self):
            seen.append(sorted(path.name for path in work.glob("*/hub/models--*")))
            return False

    job = attempt(submit_with(TOKEN), stop=Watching())
    assert job.status == "succeeded"
    assert {token for _, token, _ in hub.asked} == {f"Bearer {TOKEN}"}
    assert ["models--org--model"] in seen
    assert not (tmp_path / "shared-cache").exists()
    assert list(work.iterdir()) == []


def test_a_failed_job_with_a_token_leaves_nothing_of_its_model(hub, submit_with, attempt, work):
    name = next(name for name in hub.repositories["org/model"] if name == "tokenizer.json")
    hub.repositories["org/model"][name] = b"{}"
    job = attempt(submit_with(TOKEN))
    assert job.status == "failed"
    assert list(work.glob("*/hub")) == []


def test_a_changed_secret_key_fails_the_job_with_a_reason(hub, submit_with, attempt, settings):
    job_id = submit_with(TOKEN)
    (settings.data_dir / "secret.key").unlink()
    job = attempt(job_id)
    assert (job.status, job.error["code"]) == ("failed", "invalid_settings")
    assert "ROCKET_SECRET_KEY" in job.error["message"]
    assert hub.asked == []


@pytest.mark.parametrize("how", ["silent", "trickle"])
@pytest.mark.parametrize("path", ["/api/models", "/org/model/resolve"])
def test_a_hanging_download_can_be_cancelled(hub, submit_with, attempt, how, path, cancel, look):
    setattr(hub, how, [path])
    job_id, stop = submit_with(), threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    began = time.monotonic()
    assert attempt(job_id, stop=stop).status == "queued"
    assert time.monotonic() - began < 5
    # Whatever still waits for the Hub ends with it.
    hub.__exit__()
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("download")], within=30)


def test_evaluation_uses_the_uploaded_file_and_operator_tasks(
    submit_with, attempt, model, uploaded, published, settings, messages
):
    pytest.importorskip("lm_eval")
    settings.datasets_folder.mkdir(parents=True, exist_ok=True)
    item = {"context": "a", "choices": [" b", " c"], "gold": 0}
    (settings.datasets_folder / "quiz.jsonl").write_text(json.dumps(item))
    evaluate = {"dataset": f"upload/{uploaded.id}", "samples": 2, "sequence_length": 16, "tasks": ["local/quiz.jsonl"]}

    job = attempt(submit_with(model_id="local/tiny", evaluate=evaluate))

    assert job.status == "succeeded"
    assert messages(job.id)[-2:] == ["evaluating", "succeeded"]
    report = CompressionReport.model_validate_json(published(job.id)["report.json"])
    assert report.evaluation.dataset == f"upload-{uploaded.id}.jsonl"
    assert [score.task for score in report.evaluation.after.tasks] == ["quiz", "quiz"]


def test_calibration_uses_the_uploaded_file(submit_with, attempt, model, uploaded, published):
    own = {"calibration": QUICK["calibration"] | {"dataset": f"upload/{uploaded.id}"}, "model_id": "local/tiny"}
    job = attempt(submit_with(**own))
    assert job.status == "succeeded"
    report = CompressionReport.model_validate_json(published(job.id)["report.json"])
    assert report.calibration.dataset == f"upload-{uploaded.id}.jsonl"
    other = attempt(submit_with(model_id="local/tiny"))
    assert (
        CompressionReport.model_validate_json(published(other.id)["report.json"]).calibration.token_sha256
        != report.calibration.token_sha256
    )


def test_a_damaged_upload_is_not_used(submit_with, attempt, model, uploaded, settings, tmp_path):
    (settings.data_dir / "artifacts" / uploaded.storage_key).write_bytes(LINES[:-1])
    job = attempt(submit_with(model_id="local/tiny", calibration={"dataset": f"upload/{uploaded.id}"}))
    assert (job.status, job.error["code"]) == ("failed", "storage_error")
    assert str(tmp_path) not in job.error["message"]


def test_a_token_reaches_its_process_and_is_not_exposed(
    hub, submit_with, configure, database, look, monkeypatch, capfd, settings, tmp_path
):
    job_id = submit_with(TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    thread = threading.Thread(target=Runner(configure(log_level="debug"), database).run, daemon=True)
    thread.start()
    seen = []
    while thread.is_alive():
        for child in psutil.Process().children(recursive=True):
            try:
                seen.append(" ".join([*child.cmdline(), *child.environ().values()]))
            except psutil.Error:
                continue
        thread.join(0.2)
    assert look(job_id).status == "succeeded", look(job_id).error
    assert any("worker.attempt.job" in text for text in seen)
    # The Hub's client also requests resources without an owner, without a token.
    assert {token for path, token, _ in hub.asked if "org/model" in path} == {f"Bearer {TOKEN}"}
    printed = capfd.readouterr()
    files = [file.read_bytes() for file in [*tmp_path.rglob("*")] if file.is_file()]
    texts = [*files, *(text.encode() for text in (*seen, printed.out, printed.err))]
    assert not [text[:200] for text in texts if b"canary" in text]
    with database.snapshot() as session:
        assert session.get_one(Job, job_id).hub_token is None
    shutil.rmtree(Path(tmp_path / "home"), ignore_errors=True)
