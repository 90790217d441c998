"""Counting with Redis, without it, and while it refuses or hangs."""

import socket
import time

import pytest
from pydantic import SecretStr

from app.main import create_app
from app.services.rate_limits import _REDIS_SECONDS, RateLimiter
from app.shared.errors import RateLimitedError
from app.shared.settings import Settings
from tests.app.conftest import local_client

# Without a timeout a request would wait for ever.
ANSWERED_WITHIN = 5.0


def limiter(**chosen):
    return RateLimiter(Settings(**{"rate_limit": "2/minute", "submit_rate_limit": "1/minute"} | chosen))


def accepted(limiter, who="tenant a", **options):
    try:
        limiter.count_request(who, **options)
    except RateLimitedError:
        return False
    return True


@pytest.fixture
def refusing():
    """Return the address of a Redis that does not exist."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{free.getsockname()[1]}/0"


@pytest.fixture
def hanging():
    """Return the address of a Redis that accepts connections and never answers, like a suspended one."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


def test_each_client_has_its_own_limit():
    counting = limiter()
    assert [accepted(counting) for _ in range(3)] == [True, True, False]
    assert [accepted(counting, "tenant b") for _ in range(3)] == [True, True, False]


def test_submissions_also_count_as_requests():
    counting = limiter()
    assert [accepted(counting, is_submission=True) for _ in range(2)] == [True, False]
    assert not accepted(counting)


def test_failures_are_counted_separately():
    counting = limiter()
    for _ in range(30):
        counting.count_failure("address 10.0.0.1")
    with pytest.raises(RateLimitedError):
        counting.count_failure("address 10.0.0.1")
    counting.count_failure("address 10.0.0.2")
    assert accepted(counting, "address 10.0.0.1")


def test_a_client_that_waits_retry_after_is_accepted():
    counting = limiter(rate_limit="1/second")
    assert accepted(counting)
    with pytest.raises(RateLimitedError) as refused:
        counting.count_request("tenant a")
    assert refused.value.retry_after == 1
    time.sleep(refused.value.retry_after)
    assert accepted(counting)


@pytest.mark.parametrize("kind", ["refusing", "hanging"])
def test_an_unavailable_redis_delays_once_and_counts_locally(kind, request):
    counting = limiter(broker_url=SecretStr(request.getfixturevalue(kind)))
    began = time.monotonic()
    first = accepted(counting, is_submission=True)
    took = time.monotonic() - began
    began = time.monotonic()
    rest = [accepted(counting) for _ in range(3)]
    assert (first, rest) == (True, [True, False, False])
    assert took < ANSWERED_WITHIN
    assert time.monotonic() - began < _REDIS_SECONDS, "it is asked again too soon"


def test_replicas_share_their_counts(settings, redis_server, monkeypatch):
    # However slowly Redis answers on a busy machine.
    monkeypatch.setattr("app.services.rate_limits._REDIS_SECONDS", 10.0)
    shared = settings.model_copy(update={"broker_url": SecretStr(redis_server.url), "rate_limit": "3/hour"})
    with local_client(create_app(shared)) as one, local_client(create_app(shared)) as other:
        told = [client.get("/models").status_code for client in (one, other, one, other, one)]
    assert told == [200, 200, 200, 429, 429]


def test_a_request_is_answered_while_redis_hangs(settings, hanging):
    app = create_app(settings.model_copy(update={"broker_url": SecretStr(hanging)}))
    with local_client(app) as client:
        began = time.monotonic()
        assert client.get("/models").status_code == 200
        assert time.monotonic() - began < ANSWERED_WITHIN


def test_a_recovered_redis_counts_again(refusing, monkeypatch):
    counting = limiter(broker_url=SecretStr(refusing))
    asked = []
    hit = type(counting._shared).hit

    def spy(self, *arguments):
        asked.append(self is counting._shared)
        return hit(self, *arguments)

    monkeypatch.setattr(type(counting._shared), "hit", spy)
    accepted(counting)
    accepted(counting)
    assert asked == [True, False, False]
    later = time.monotonic() + 31
    monkeypatch.setattr("app.services.rate_limits.time.monotonic", lambda: later)
    accepted(counting)
    assert asked[3:] == [True, False]
