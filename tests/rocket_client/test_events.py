import itertools
import threading
import time

import pytest

from app.api.streams import Streams
from rocket_client.errors import ProblemError, ServerUnreachableError
from rocket_client.models import Event, Progress
from tests.loopback_service import ServerProcess, in_background

pytestmark = pytest.mark.both_clients


def numbers(told):
    return [news.id for news in told if isinstance(news, Event)]


@pytest.fixture
def failed(service):
    """Return a job with four events."""
    job_id = service.submit()
    service.fail(service.claim(job_id))
    return job_id


def test_a_finished_job_sends_all_events(client, failed):
    told = list(client.events(failed))

    assert numbers(told) == [1, 2, 3, 4]
    assert [news.type for news in told[:4]] == ["status", "status", "error", "status"]
    assert told[2].message == "a file is damaged"
    assert isinstance(told[4], Progress)
    assert told[4].status == "failed"


def test_seen_events_are_not_repeated(client, failed):
    assert numbers(client.events(failed, after=3)) == [4]


def test_a_job_is_followed_until_it_ends(client, service):
    job_id = service.submit()
    told = []
    stream = client.events(job_id)
    told.append(next(stream))
    lease = service.claim(job_id)
    steps = [
        lambda: service.progress(lease, "calibrating", 0.25),
        lambda: service.profile(lease, "model.layers.0.q"),
        lambda: service.progress(lease, "calibrating", 0.5),
        lambda: service.succeed(lease, {}),
    ]
    with in_background(*itertools.chain.from_iterable((step, lambda: time.sleep(0.2)) for step in steps)):
        told += stream

    assert [news.type for news in told if isinstance(news, Event)] == [
        *("status", "status", "stage", "layer", "allocation", "status"),
    ]
    assert numbers(told) == list(range(1, 7))
    seen = [news.progress for news in told if isinstance(news, Progress)]
    assert seen == sorted(seen)
    assert {0.25, 0.5, 1.0} <= set(seen)


def test_waiting_returns_the_finished_job(client, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    news = []
    with in_background(lambda: time.sleep(0.2), lambda: service.succeed(lease, {})):
        job = client.wait(job_id, on_news=news.append)

    assert (job.status, job.result.kept_parameters) == ("succeeded", 7_000_000)
    assert numbers(news) == [1, 2, 3, 4]


def test_a_restarted_server_loses_no_event(connect, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    waits, told = [], []
    with (
        ServerProcess(service.settings.data_dir) as server,
        connect(server.url, patience=5, on_retry=waits.append) as client,
    ):
        stream = client.events(job_id, patience=60)
        told += itertools.islice(stream, 3)
        server.kill()
        steps = [
            lambda: service.profile(lease, "model.layers.0.q"),
            lambda: time.sleep(0.5),
            server.start,
            lambda: service.warn(lease, "slow"),
            lambda: service.fail(lease),
        ]
        with in_background(*steps):
            told += stream

    assert numbers(told) == list(range(1, 7))
    assert told[-1].status == "failed"
    assert "Connection refused" in [wait.reason for wait in waits]


def test_following_gives_up_when_the_server_stays_down(connect, service):
    job_id = service.submit()
    with ServerProcess(service.settings.data_dir) as server, connect(server.url) as client:
        stream = client.events(job_id, patience=0.5)
        next(stream)
        server.kill()
        began = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            list(stream)
        assert time.monotonic() - began < 5


def test_a_stream_starts_once_the_server_has_capacity(client, server, failed, monkeypatch):
    monkeypatch.setattr("app.api.problems.RETRY_AFTER_SECONDS", 1)
    server.application.state.streams = Streams(0, share=0)
    timer = threading.Timer(0.5, lambda: setattr(server.application.state, "streams", Streams(1, share=1)))
    timer.start()

    assert numbers(client.events(failed)) == [1, 2, 3, 4]
    timer.join()


def test_a_server_without_stream_capacity_is_reported(client, server, failed, monkeypatch):
    monkeypatch.setattr("app.api.problems.RETRY_AFTER_SECONDS", 1)
    server.application.state.streams = Streams(0, share=0)

    with pytest.raises(ProblemError) as refused:
        list(client.events(failed, patience=0.5))
    assert refused.value.code == "too_many_streams"


def test_a_deleted_job_ends_its_stream(client, service, failed):
    stream = client.events(failed)
    next(stream)
    client.delete(failed)
    # Buffered events may still arrive; a client that reconnects finds nothing.
    list(stream)
    with pytest.raises(ProblemError) as refused:
        list(client.events(failed))
    assert refused.value.code == "job_not_found"


def test_unknown_kinds_of_events_are_passed_on_or_skipped(client, server, failed, monkeypatch):
    async def newer(*arguments):
        yield 'event: weather\ndata: {"sun": true}\n\n'
        yield "event: shrug\ndata: ?\n\n"
        yield (
            'id: 1\nevent: party\ndata: {"id": 1, "created_at": "2026-01-01T00:00:00Z", "level": "joy", '
            '"type": "party", "message": "m", "data": {}, "guests": 3}\n\n'
        )
        yield "event: done\ndata: {}\n\n"

    monkeypatch.setattr("app.api.routes.events._follow", newer)

    (event,) = client.events(failed)
    assert (event.type, event.level) == ("party", "joy")
