"""Jobs that push the artifact of an earlier job to the Hub, here a server on the loopback."""

import os
import threading

import psutil
import pytest
from huggingface_hub import constants, utils
from pydantic import SecretStr

from app.shared.encryption import encrypt
from app.shared.repositories import jobs, works
from app.shared.requests import JobRequest, PushRequest
from tests.loopback_service import free_port, wait_for
from tests.reference.upload_hub import LARGE_BYTES, TOKEN, UploadHub
from tests.worker.threads import ThreadedAttempt as Attempt
from worker.confined.messages import UploadRequest
from worker.confined.push import _Sent, _upload
from worker.runner import Runner

REQUEST = {
    "calibration": {"samples": 8, "sequence_length": 16},
    "options": {"preset": "paper", "ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
REPO = "alice/small"

# A warning of the Hub's client about its own code.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch):
    with UploadHub() as hub:
        hub.replace_the_hub(monkeypatch)
        # For other processes, where the store that only the real Hub has is missing as well.
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        before = set(threading.enumerate())
        yield hub
        hub.let_go()
        # The server's threads end with the connections that the Hub's client keeps open.
        utils.close_session()
        wait_for(lambda: all("request" not in thread.name for thread in set(threading.enumerate()) - before))


@pytest.fixture
def attempt(settings, database, claim, look):
    def attempt(job_id, stop=None):
        Attempt(settings, database, claim(job_id), stop or threading.Event()).run(os.getppid())
        return look(job_id)

    return attempt


@pytest.fixture
def push(database, settings):
    """Submit a job that pushes the result of another one, as the API does."""

    def push(job_id, token=TOKEN, **body):
        with database.transaction() as session:
            source = JobRequest.model_validate(jobs.get_job(session, job_id).request)
            wanted = PushRequest(**{"repository": REPO, "export": "rocket"} | body).job_request(job_id, source, None)
            stored = None if token is None else encrypt(settings, SecretStr(token))
            return jobs.create_job(session, wanted, max_attempts=3, hub_token=stored).job.id

    return push


@pytest.fixture
def finished(submit, attempt, model):
    """Return a job whose result can be pushed."""
    job_id = submit(**REQUEST)
    assert attempt(job_id).status == "succeeded"
    return job_id


@pytest.fixture
def expected(finished, published):
    """Return the files that the repository must have."""
    files = {name.removeprefix("rocket/"): text for name, text in published(finished).items() if "rocket/" in name}
    assert any(len(text) > LARGE_BYTES for text in files.values())
    return files


@pytest.fixture
def report_of(database):
    def report_of(job):
        with database.snapshot() as session:
            return works.find_report(session, job)

    return report_of


def test_an_export_is_pushed_in_one_commit(finished, push, attempt, hub, expected, report_of, work):
    job = attempt(push(finished))
    assert (job.status, job.error, job.progress) == ("succeeded", None, 1.0)
    assert hub.files(REPO) == expected
    assert hub.messages == ["local/tiny, rocket export, compressed by Rocket"]
    report = report_of(job)
    assert (report.repository, report.url, report.is_new) == (REPO, f"{hub.url}/{REPO}", True)
    assert (report.files, report.size) == (len(expected), sum(map(len, expected.values())))
    assert job.hub_token is None
    assert list(work.iterdir()) == []


def test_a_repeated_push_sends_and_commits_nothing(finished, push, attempt, hub, report_of):
    first = report_of(attempt(push(finished)))
    received = list(hub.received)
    again = report_of(attempt(push(finished)))
    assert (again.is_new, again.commit) == (False, first.commit)
    assert (hub.commits(REPO), hub.received) == (1, received)


def test_a_private_push_makes_a_private_repository(finished, push, attempt, hub):
    assert attempt(push(finished, private=True)).status == "succeeded"
    assert hub.private == {REPO}


def test_a_public_repository_is_refused_for_a_private_push(finished, push, attempt, hub):
    attempt(push(finished))
    job = attempt(push(finished, private=True))
    assert (job.status, job.error["code"]) == ("failed", "repository_is_public")


@pytest.mark.parametrize(
    ("changes", "code", "advice"),
    [
        ({"token": "hf_unknown"}, "hub_token_invalid", "create a new one in your Hub settings"),
        ({"repository": "bob/small"}, "hub_forbidden", "use a token with write access"),
        ({"token": None}, "hub_token_invalid", "push again with a token"),
    ],
)
def test_a_refused_token_ends_it_with_advice(finished, push, attempt, hub, messages, changes, code, advice):
    job = attempt(push(finished, **changes))
    assert (job.status, job.error["code"], job.error["retryable"]) == ("failed", code, False)
    assert advice in job.error["message"]
    assert "hf_unknown" not in str(job.error) + str(messages(job.id))


@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_hub_is_asked_again(finished, push, attempt, hub, expected, status):
    job_id = push(finished)
    hub.refusals["POST", f"/api/models/{REPO}/commit/"] = (status, "later")
    job = attempt(job_id)
    assert (job.status, job.error) == ("queued", None)
    received = list(hub.received)
    hub.refusals.clear()
    assert attempt(job_id).status == "succeeded"
    assert hub.files(REPO) == expected
    assert hub.received == received, "nothing is sent twice"


def test_an_unreachable_hub_is_asked_again(finished, push, attempt, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert attempt(push(finished)).status == "queued"


def test_a_push_that_hangs_can_be_cancelled(finished, push, attempt, hub, cancel, in_background):
    job_id, stop = push(finished), threading.Event()
    hub.hold(f"/api/models/{REPO}/commit/")

    def cancel_when_it_hangs():
        wait_for(lambda: hub.held)
        cancel(job_id)
        stop.set()
        hub.let_go()

    in_background(cancel_when_it_hangs)
    job = attempt(job_id, stop)
    assert (job.status, job.hub_token) == ("cancelled", None)
    assert hub.commits(REPO) == 0


def test_killed_while_it_pushes_it_ends_with_one_commit(
    settings, database, finished, push, hub, look, expected, in_background
):
    """The process of the attempt, with its confined child, is killed before the commit; the next one completes it."""
    job_id = push(finished)
    hub.hold(f"/api/models/{REPO}/commit/")

    def kill_when_it_hangs():
        wait_for(lambda: hub.held)
        for process in psutil.Process().children():
            if job_id in process.cmdline():
                process.kill()

    killer = in_background(kill_when_it_hangs)
    assert Runner(settings, database).run()
    killer.join()
    assert look(job_id).status == "queued"
    assert look(job_id).hub_token is not None
    hub.let_go()
    assert Runner(settings, database).run()
    job = look(job_id)
    assert (job.status, job.error, job.attempt) == ("succeeded", None, 2)
    assert (hub.files(REPO), hub.commits(REPO)) == (expected, 1)
    assert job.hub_token is None


def test_the_bytes_of_a_large_file_are_counted_while_it_is_sent(hub, tmp_path, capsys):
    folder, content = tmp_path / "rocket", {"a.safetensors": b"a" * 300_000, "b.json": b"{}", "c.bin": b"c" * 100_000}
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_bytes(text)
    shares = []

    class Observed(_Sent):
        def on_file(self, size):
            shares.append(round(self.share * self.total))
            super().on_file(size)

    request = {"folder": folder, "repository": REPO, "private": False, "message": "m", "token": TOKEN}
    sent = Observed()
    with sent.counted_bars():
        report = _upload(UploadRequest(log_level="info", **request), sent)
    assert (report.files, report.size) == (3, 400_002)
    # Before a file counts as complete, all bytes of a large one have been counted; a small one comes with the commit.
    assert shares == [300_000, 300_000, 400_002]
    assert capsys.readouterr().err == "", "no progress bar is drawn"
