"""`rocket cancel` and `rocket retry`, which continues a cancelled job."""

import json

from app.shared.repositories import leases
from tests.loopback_service import in_background, wait_for


def test_a_queued_job_is_cancelled_at_once(remote, client, service):
    job_id = service.submit()

    outcome = remote("cancel", job_id)

    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"rocket: {job_id} is cancelled; `rocket retry {job_id}` resumes from its checkpoints\n"
    assert client.get_job(job_id).status == "cancelled"


def test_a_running_job_is_asked_to_stop(remote, client, service):
    job_id = service.submit()
    service.claim(job_id)

    outcome = remote("cancel", job_id)

    assert outcome.code == 0
    assert "stops as soon as its worker notices" in outcome.err
    assert client.get_job(job_id).status == "cancelling"


def test_cancel_can_wait_until_the_job_has_stopped(remote, client, service):
    job_id = service.submit()
    lease = service.claim(job_id)

    def stop():
        wait_for(lambda: client.get_job(job_id).status == "cancelling")
        service.do(leases.release_job, lease)

    with in_background(stop):
        outcome = remote("cancel", job_id, "--wait", "--json")

    assert outcome.code == 0
    assert json.loads(outcome.out)["status"] == "cancelled"


def test_a_finished_job_cannot_be_cancelled(remote, service):
    outcome = remote("cancel", service.succeeded({}))

    assert outcome.code == 8
    assert "has succeeded and can no longer be cancelled" in outcome.err


def test_a_cancelled_job_is_retried_as_a_new_one(remote, client, service):
    job_id = service.submit()
    remote("cancel", job_id)

    outcome = remote("retry", job_id)

    new = client.list_jobs().data[0]
    assert (outcome.code, outcome.out, new.retry_of) == (0, f"{new.id}\n", job_id)
    assert f"`rocket watch {new.id}`" in outcome.err
    assert json.loads(remote("retry", job_id, "--json").out)["id"] == new.id, "repeated, it is the same new job"


def test_a_queued_job_cannot_be_retried(remote, service):
    assert remote("retry", service.submit()).code == 8
