"""Jobs whose blocks several workers share, some of which are killed; on Postgres, Redis and a common data folder."""

import os
import shutil
import signal

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.kill_matrix import uninterrupted
from tests.e2e.watching import REQUEST, assert_whole, events_of
from tests.sampling import sweep

LONG = REQUEST | {"calibration": {"samples": 192, "sequence_length": 256}}
HELPS = " helps with blocks of the model"


@pytest.fixture(scope="module")
def of_long(tmp_path_factory, small_model):
    return uninterrupted(small_model, tmp_path_factory.mktemp("expected") / "out", LONG)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, small_model, postgres, redis_server):
    data_dir = tmp_path_factory.mktemp("helping") / "data"
    shutil.copytree(small_model, data_dir / "models" / "tiny-llama")
    name = postgres.create()
    urls = {"ROCKET_DATABASE_URL": postgres.url(name), "ROCKET_BROKER_URL": redis_server.url}
    deployment = Deployment(data_dir, workers=3, ROCKET_HELP_JOBS="true", **urls)
    yield deployment
    deployment.close()
    postgres.drop(name)


@pytest.fixture
def service(deployment):
    """Return the service with three workers, whatever happened to them before."""
    deployment.revive()
    return deployment


def helpers_of(service, job_id):
    """Return the process ids of the workers that help."""
    messages = [event["message"] for event in events_of(service, job_id)]
    return [int(message.removesuffix(HELPS).rpartition(":")[2]) for message in messages if message.endswith(HELPS)]


def helped(service):
    """Submit a job, wait for two helpers, and return it with their process ids."""
    job_id = service.submit(**LONG)
    service.wait(job_id, until=lambda _: len(helpers_of(service, job_id)) >= 2, look_seconds=0.2)
    return job_id, helpers_of(service, job_id)


@pytest.mark.parametrize("victim", sweep(["a helper"], soak=["none", "the worker"]))
def test_workers_share_the_blocks_of_a_job(victim, service, of_long):
    job_id, helpers = helped(service)
    if victim == "a helper":
        os.kill(helpers[0], signal.SIGKILL)
    elif victim == "the worker":
        [busy] = {service.pid(f"worker{number}") for number in range(3)} - set(helpers)
        os.kill(busy, signal.SIGKILL)

    job = service.finished(job_id)

    assert (job["status"], job["attempt"]) == ("succeeded", 2 if victim == "the worker" else 1)
    assert service.hashes(job_id) == of_long
    if victim == "a helper":
        assert_whole(service, job_id, of_long)
    if victim != "the worker":
        stages = service.client.get(f"/jobs/{job_id}/report").json()["stages"]
        devices = [stage["device"] for stage in stages if stage["name"] in {"calibrating", "factorizing"}]
        assert any(device.startswith(("2 x ", "3 x ")) for device in devices), devices


@pytest.mark.soak
def test_a_helper_takes_a_job_that_waits(service):
    first, _ = helped(service)
    waiting = service.submit(**REQUEST)
    service.wait(waiting, until=lambda job: job["status"] != "queued", look_seconds=0.2)
    assert service.job(first)["attempt"] == 1
    assert [service.finished(job_id)["status"] for job_id in (first, waiting)] == ["succeeded"] * 2
