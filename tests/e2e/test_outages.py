"""Outages of Postgres and Redis: effects on a service and its jobs."""

import time

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.kill_matrix import FAILPOINTS, ROOT
from tests.reference.tiny_models import save_tiny_model

REQUEST = {"model_id": "local/tiny", "ratio": 0.3, "calibration": {"samples": 2, "sequence_length": 16}}
# The broker does not depend on what a job does, so that the job need not load torch.
IDLE = REQUEST | {"metadata": {"work": "none"}}
# Less than the 5 seconds after which a request to the broker times out.
PATIENCE_SECONDS = 4.0


@pytest.fixture(scope="module")
def service(tmp_path_factory, postgres, redis_server):
    """Return one deployment for all outages, one after another."""
    data_dir = tmp_path_factory.mktemp("outages") / "data"
    save_tiny_model("llama", data_dir / "models" / "tiny")
    name = postgres.create(postgres.migrated)
    given = {
        "PYTHONPATH": f"{FAILPOINTS}:{ROOT}",
        "STAND_IN": str(FAILPOINTS / "stand_in.py"),
        "ROCKET_DATABASE_URL": postgres.url(name),
        "ROCKET_BROKER_URL": redis_server.url,
        "ROCKET_NOTIFY_SECONDS": "1",
        # Longer than a busy machine takes to start a database again.
        "ROCKET_LEASE_SECONDS": "40",
    }
    service = Deployment(data_dir, **given)
    # The first request that reads a model waits for the process from which others are forked.
    assert service.client.post("/estimates", json=REQUEST).status_code == 200
    yield service
    service.close()
    postgres.drop(name)


def answers_in_time(service):
    """Check that no request waits for the broker despite the outage; return the id of the accepted job."""
    began = time.monotonic()
    accepted = service.client.post("/jobs", json=IDLE)
    took = [time.monotonic() - began]
    for path in ("/jobs", f"/jobs/{accepted.json()['id']}", "/readyz"):
        began = time.monotonic()
        assert service.client.get(path).status_code == 200
        took.append(time.monotonic() - began)
    assert accepted.status_code == 202
    assert max(took) < PATIENCE_SECONDS, took
    return accepted.json()["id"]


def succeeded(service, job_id):
    job = service.finished(job_id)
    return job["status"] == "succeeded" and job["attempt"] == 1


def test_a_killed_redis_delays_no_response_and_loses_no_job(service, redis_server):
    redis_server.kill()
    try:
        job_id = answers_in_time(service)
        assert succeeded(service, job_id)
    finally:
        redis_server.start()


def test_a_hanging_redis_delays_no_response_and_loses_no_job(service, redis_server):
    redis_server.freeze()
    try:
        job_id = answers_in_time(service)
        # Again, now with a client waiting for its response.
        time.sleep(1)
        waiting = answers_in_time(service)
        assert succeeded(service, job_id)
    finally:
        redis_server.thaw()
    assert succeeded(service, waiting)


def test_a_flushed_redis_loses_no_job(service, redis_server):
    job_ids = [answers_in_time(service) for _ in range(2)]
    redis_server.flush()
    assert all(succeeded(service, job_id) for job_id in job_ids)


def test_a_postgres_crash_during_a_job_loses_nothing(service, postgres):
    job_id = service.submit(**REQUEST)
    service.wait(job_id, until=lambda job: job["stage"] == "calibrating")
    postgres.crash()
    try:
        answer = service.client.get(f"/jobs/{job_id}")
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert answer.headers["Retry-After"]
        assert service.client.get("/healthz").status_code == 200
        assert service.client.get("/readyz").status_code == 503
    finally:
        postgres.start()
    # No process was killed, and no lease has expired: the same attempt continues.
    assert succeeded(service, job_id)
    layers = service.client.get(f"/jobs/{job_id}/layers").json()["data"]
    assert len({layer["name"] for layer in layers}) == len(layers) == 14
    assert service.client.get("/readyz").status_code == 200
