"""A job whose blocks several workers share, some of which are killed; on Postgres, Redis and a common data folder."""

import os
import signal

import pytest

from tests.e2e.kill_matrix import uninterrupted
from tests.e2e.watching import REQUEST, assert_whole, events_of

LONG = REQUEST | {"calibration": {"samples": 192, "sequence_length": 256}}
HELPS = " helps with blocks of the model"

pytestmark = pytest.mark.databases("postgres")


@pytest.fixture(scope="module")
def of_long(tmp_path_factory, small_model):
    return uninterrupted(small_model, tmp_path_factory.mktemp("expected") / "out", LONG)


def helpers_of(service, job_id):
    """Return the process ids of the workers that help."""
    messages = [event["message"] for event in events_of(service, job_id)]
    return [int(message.removesuffix(HELPS).rpartition(":")[2]) for message in messages if message.endswith(HELPS)]


@pytest.mark.parametrize("fate", ["nobody", "a helper", "the worker"])
def test_workers_share_the_blocks_of_a_job(fate, start_service, of_long):
    service = start_service(workers=3, ROCKET_HELP_JOBS="true")
    job_id = service.submit(**LONG)
    service.wait(job_id, until=lambda _: len(helpers_of(service, job_id)) == 2, look_seconds=0.2)
    helpers = helpers_of(service, job_id)
    if fate == "a helper":
        os.kill(helpers[0], signal.SIGKILL)
    elif fate == "the worker":
        [busy] = {service.pid(f"worker{number}") for number in range(3)} - set(helpers)
        os.kill(busy, signal.SIGKILL)

    job = service.finished(job_id)

    assert (job["status"], job["attempt"]) == ("succeeded", 2 if fate == "the worker" else 1)
    if fate == "nobody":
        assert_whole(service, job_id, of_long)
    else:
        assert service.hashes(job_id) == of_long
    stages = service.client.get(f"/jobs/{job_id}/report").json()["stages"]
    devices = [stage["device"] for stage in stages if stage["name"] in {"calibrating", "factorizing"}]
    assert any(device.startswith(("2 x ", "3 x ")) for device in devices), devices


def test_a_helper_takes_the_next_job(start_service):
    service = start_service(workers=2, ROCKET_HELP_JOBS="true")
    first = service.submit(**LONG)
    service.wait(first, until=lambda _: helpers_of(service, first), look_seconds=0.2)

    second = service.submit(**REQUEST)

    service.wait(second, until=lambda job: job["status"] == "running")
    assert service.job(first)["status"] == "running"
    assert service.finished(second)["status"] == "succeeded"
    assert service.finished(first)["status"] == "succeeded"
