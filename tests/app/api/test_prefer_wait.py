import threading
import time

import pytest
from sqlalchemy import text

from app.api.prefer_wait import _seconds_to_wait
from app.api.streams import Streams
from app.services.access import LOCAL_CALLER
from app.shared.outcomes import JobError
from tests.app.api.conftest import BODY

WAIT = {"Prefer": "wait=30"}
BROKEN = JobError(code="broken", message="it broke")


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    monkeypatch.setattr("app.api.prefer_wait.SECONDS_BETWEEN_LOOKS", 0.02)


@pytest.fixture
def later(monkeypatch):
    """Call a function some time after a request starts to wait."""
    timers = []
    acquire = Streams.acquire

    def acquire_and_start(streams, caller):
        acquire(streams, caller)
        for timer in timers:
            timer.start()

    monkeypatch.setattr(Streams, "acquire", acquire_and_start)

    def later(action, *arguments, seconds=0.2):
        timers.append(threading.Timer(seconds, action, arguments))

    yield later
    for timer in timers:
        timer.join()


def timed(request, *arguments, **options):
    began = time.monotonic()
    answer = request(*arguments, **options)
    return answer, time.monotonic() - began


def test_a_waiting_request_is_answered_when_the_job_ends(client, submitted, worker, later):
    later(worker.fail, submitted, BROKEN)
    answer, seconds = timed(client.get, f"/jobs/{submitted}", headers=WAIT)
    assert answer.json()["status"] == "failed"
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert "Retry-After" not in answer.headers
    assert 0.2 <= seconds < 10


def test_a_finished_job_is_returned_without_waiting(client, submitted, worker):
    worker.fail(submitted, BROKEN)
    answer, seconds = timed(client.get, f"/jobs/{submitted}", headers=WAIT)
    assert answer.json()["status"] == "failed"
    assert seconds < 5


def test_the_wait_ends_after_the_requested_time(client, submitted):
    answer, seconds = timed(client.get, f"/jobs/{submitted}", headers={"Prefer": "wait=1"})
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    assert int(answer.headers["Retry-After"]) > 0
    assert 1 <= seconds < 5


def test_without_the_preference_there_is_no_wait(client, submitted):
    answer, seconds = timed(client.get, f"/jobs/{submitted}")
    assert "Preference-Applied" not in answer.headers
    assert seconds < 5


def test_a_submission_can_wait_for_its_job(client, context, later, worker):
    def cancel():
        with context.database.transaction() as session:
            session.execute(text("UPDATE jobs SET status = 'cancelled'"))

    later(cancel)
    answer = client.post("/jobs", json=BODY, headers=WAIT)
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    assert answer.headers["Preference-Applied"] == "wait=30"
    assert answer.headers["Location"] == f"/jobs/{answer.json()['id']}"


def test_a_refused_submission_does_not_wait(client):
    answer, seconds = timed(client.post, "/jobs", json=BODY | {"model_id": "local/none"}, headers=WAIT)
    assert answer.status_code == 422
    assert seconds < 5


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_job_deleted_during_the_wait_is_returned_as_it_was(client, submitted, context, later, method):
    def remove():
        with context.database.transaction() as session:
            session.execute(text("DELETE FROM jobs"))

    later(remove)
    ask = {"json": BODY, "headers": WAIT} if method == "POST" else {"headers": WAIT}
    answer = client.request(method, "/jobs" if method == "POST" else f"/jobs/{submitted}", **ask)
    assert answer.json()["status"] == "queued"


def test_waiting_requests_count_as_streams(client, submitted, app):
    app.state.streams = Streams(1, share=1)
    app.state.streams.acquire(LOCAL_CALLER)
    answer, seconds = timed(client.get, f"/jobs/{submitted}", headers=WAIT)
    assert answer.status_code == 200
    assert "Preference-Applied" not in answer.headers
    assert seconds < 5


def test_the_place_of_a_waiting_request_is_released(client, submitted, app):
    app.state.streams = Streams(1, share=1)
    for _ in range(2):
        assert "Preference-Applied" in client.get(f"/jobs/{submitted}", headers={"Prefer": "wait=1"}).headers
    app.state.streams.acquire(LOCAL_CALLER)


def test_waiting_requests_return_when_the_service_stops(client, submitted, app, later):
    later(app.state.streams.close)
    answer, seconds = timed(client.get, f"/jobs/{submitted}", headers=WAIT)
    assert answer.json()["status"] == "queued"
    assert seconds < 10


def test_waiting_requests_block_no_thread(client, submitted, app, worker):
    # More than the 40 threads of the pool.
    answers = []
    waiting = [
        threading.Thread(target=lambda: answers.append(client.get(f"/jobs/{submitted}", headers=WAIT)))
        for _ in range(45)
    ]
    for thread in waiting:
        thread.start()
    _, seconds = timed(client.get, "/models")
    worker.fail(submitted, BROKEN)
    for thread in waiting:
        thread.join()
    assert seconds < 5
    assert {answer.json()["status"] for answer in answers} == {"failed"}


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ([], 0),
        (["wait=5"], 5),
        (["WAIT = 5"], 5),
        (['wait="5"'], 5),
        (["wait=600"], 60),
        (["wait=5, wait=7"], 5),
        (["respond-async, wait=5"], 5),
        (["respond-async", "wait=5"], 5),
        (["wait=5; x=1"], 5),
        (["wait"], 0),
        (["wait=-5"], 0),
        (["wait=5s"], 0),
        (["nowait=5"], 0),
        (["wait=" + "9" * 400], 0),
    ],
)
def test_the_preference_is_parsed_as_specified(prefer, seconds):
    assert _seconds_to_wait(prefer) == seconds
