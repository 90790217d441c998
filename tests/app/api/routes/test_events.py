import itertools
import json
import threading
import time

import pytest
from sqlalchemy import text

from app.api.streams import Streams
from app.services import jobs
from app.services.access import LOCAL_CALLER
from app.shared.errors import TooManyStreamsError
from app.shared.outcomes import JobError
from app.shared.repositories import leases, outputs

pytestmark = pytest.mark.databases("sqlite", "postgres")

STREAM = {"Accept": "text/event-stream"}
BROKEN = JobError(code="broken", message="it\nbroke")


def messages(stream):
    """Parse the stream as a browser does."""
    for block in stream.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        yield fields.get("id"), fields["event"], json.loads(fields["data"])


@pytest.fixture
def failed(submitted, worker):
    worker.fail(submitted, BROKEN)
    return f"/jobs/{submitted}/events"


def test_events_resume_after_the_last_one_read(client, submitted, worker):
    worker.claim(submitted)
    first = client.get(f"/jobs/{submitted}/events", params={"limit": 1}).json()
    second = client.get(f"/jobs/{submitted}/events", params={"after": first["last_id"]}).json()
    assert [event["message"] for event in first["data"] + second["data"]] == ["queued", "running"]
    assert (first["has_more"], second["has_more"]) == (True, False)


def test_the_stream_of_a_finished_job_sends_all_events_and_ends(client, failed):
    answer = client.get(failed, headers=STREAM)
    told = list(messages(answer.text))
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert [number for number, _, _ in told if number] == ["1", "2", "3", "4"]
    assert [kind for _, kind, _ in told] == ["status", "status", "error", "status", "progress", "done"]
    assert told[-1][2]["status"] == "failed"
    assert told[2][2]["data"]["message"] == "it\nbroke"


def test_a_reconnected_stream_sends_only_missed_events(client, failed):
    answer = client.get(failed, headers=STREAM | {"Last-Event-ID": "3"})
    assert [number for number, _, _ in messages(answer.text) if number] == ["4"]


def test_an_invalid_last_event_id_is_refused(client, failed):
    assert client.get(failed, headers=STREAM | {"Last-Event-ID": "x"}).status_code == 422


def test_a_stream_lasts_until_the_job_ends(client, submitted, worker, monkeypatch):
    monkeypatch.setattr("app.api.routes.events.SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr("app.api.routes.events._KEEP_ALIVE_SECONDS", 0.05)
    lease = worker.claim(submitted)

    def work():
        for step in range(3):
            time.sleep(0.15)
            worker.do(outputs.report_progress, lease, stage="calibrating", progress=step / 10)
        worker.do(leases.fail_job, lease, BROKEN)

    thread = threading.Thread(target=work)
    thread.start()
    stream = client.get(f"/jobs/{submitted}/events", headers=STREAM).text
    thread.join()
    assert ": ping\n\n" in stream
    told = list(messages(stream.replace(": ping\n\n", "")))
    seen = [data["progress"] for _, kind, data in told if kind == "progress"]
    assert seen == sorted(seen)
    assert {0.1, 0.2} <= set(seen)
    assert told[-1][1] == "done"


def test_the_stream_of_a_deleted_job_ends(client, submitted, context, monkeypatch):
    monkeypatch.setattr("app.api.routes.events.SECONDS_BETWEEN_LOOKS", 0.02)
    list_events, looks = jobs.list_events, itertools.count(1)

    def delete_before_the_third_look(*args, **options):
        # The first is the endpoint's, which answers 404 if there is no such job; the second is sent.
        if next(looks) == 3:
            with context.database.transaction() as session:
                session.execute(text("DELETE FROM jobs"))
        return list_events(*args, **options)

    monkeypatch.setattr(jobs, "list_events", delete_before_the_third_look)
    told = client.get(f"/jobs/{submitted}/events", headers=STREAM).text
    assert [kind for _, kind, _ in messages(told)] == ["status", "progress"]


def test_the_stream_of_an_unknown_job_is_not_found(client):
    assert client.get("/jobs/job_" + "0" * 26 + "/events", headers=STREAM).status_code == 404


def test_streams_are_limited_and_released(client, failed, app):
    app.state.streams = Streams(1, share=1)
    assert client.get(failed, headers=STREAM).status_code == 200
    assert client.get(failed, headers=STREAM).status_code == 200
    app.state.streams.acquire(LOCAL_CALLER)
    answer = client.get(failed, headers=STREAM)
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_streams")
    assert int(answer.headers["Retry-After"]) > 0
    assert client.get(failed).status_code == 200


def test_open_streams_end_when_the_service_stops(client, submitted, app, monkeypatch):
    monkeypatch.setattr("app.api.routes.events.SECONDS_BETWEEN_LOOKS", 0.02)
    stopper = threading.Timer(0.2, app.state.streams.close)
    stopper.start()
    stream = client.get(f"/jobs/{submitted}/events", headers=STREAM).text
    stopper.join()
    # The proof is that it ended although the job has not; on a slow machine it was closed before it started.
    assert "done" not in [kind for _, kind, _ in messages(stream)]


def test_the_stream_count_never_exceeds_its_limit():
    count = Streams(2, share=2)
    count.acquire(LOCAL_CALLER)
    count.acquire(LOCAL_CALLER)
    with pytest.raises(TooManyStreamsError):
        count.acquire(LOCAL_CALLER)
    count.release(LOCAL_CALLER)
    count.acquire(LOCAL_CALLER)
