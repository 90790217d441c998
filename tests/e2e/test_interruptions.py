"""The service and its jobs, killed and stopped while they work, with identical bytes in the end."""

import random
import signal
import time

import pytest

from tests.e2e.watching import REQUEST, assert_whole, has_told

TERMINAL = {"succeeded", "failed", "cancelled"}


@pytest.mark.databases("sqlite", "postgres")
def test_a_job_killed_at_random_moments_gives_identical_bytes(start_service, uninterrupted):
    hashes, events = uninterrupted
    seed = random.SystemRandom().randrange(10**6)
    moments = random.Random(seed)
    # Named by the number of events so far; the last events leave no time to strike before the end.
    strikes = sorted(moments.randrange(2, len(events) - 2) for _ in range(2))
    service = start_service()
    job_id = service.submit(**REQUEST)
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
    assert_whole(service, job_id, hashes)


def is_over(job):
    return job["status"] in TERMINAL


@pytest.mark.databases("sqlite", "postgres")
def test_a_stopped_service_releases_its_job_and_resumes_at_start(start_service, uninterrupted):
    service = start_service()
    job_id = service.submit(**REQUEST)
    service.wait(job_id, until=lambda job: has_told(service, job_id, 10))
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 30
    service.start()
    job = service.finished(job_id)
    # An orderly stop is not an error and does not count as an attempt.
    assert (job["status"], job["attempt"]) == ("succeeded", 1)
    assert_whole(service, job_id, uninterrupted[0])
    assert service.stop(signal.SIGINT) == 0
