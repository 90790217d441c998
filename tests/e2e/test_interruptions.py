"""The service and its jobs, stopped and killed while they work, with identical bytes in the end."""

import random
import signal
import time

import pytest

from tests.e2e.watching import LAYERS, REQUEST, assert_whole, events_of, has_told

TERMINAL = {"succeeded", "failed", "cancelled"}
# The job is stopped here; the moments at which it is killed are later.
STOP = 10


@pytest.mark.databases("sqlite", soak=("postgres",))
def test_a_job_stopped_and_killed_gives_identical_bytes(start_service, expected):
    seed = random.SystemRandom().randrange(10**6)
    moments = random.Random(seed)
    service = start_service()
    job_id = service.submit(**REQUEST)
    service.wait(job_id, until=lambda job: has_told(service, job_id, STOP))
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 30
    service.start()
    # An orderly stop is not an error and does not count as an attempt.
    assert service.wait(job_id, until=lambda job: job["status"] != "queued")["attempt"] == 1
    # Named by the number of events so far; the last events leave no time to strike before the end.
    strikes = sorted(moments.randrange(len(events_of(service, job_id)), LAYERS + STOP) for _ in range(2))
    for strike, target in zip(strikes, moments.sample(["job", "service"], k=2), strict=True):
        service.wait(job_id, until=lambda job, strike=strike: has_told(service, job_id, strike) or is_over(job))
        time.sleep(moments.uniform(0, 0.2))
        if target == "service":
            service.kill()
            service.start()
        else:
            service.kill_job()
    job = service.finished(job_id)
    assert job["status"] == "succeeded", (seed, strikes, job, service.log.read_text()[-3000:])
    assert 1 <= job["attempt"] <= 3
    assert_whole(service, job_id, expected)
    assert service.stop(signal.SIGINT) == 0


def is_over(job):
    return job["status"] in TERMINAL
