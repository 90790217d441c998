"""`rocket webhooks`: what is asked of the server, and what is said of a test delivery."""

import json
import threading

import pytest

from app.shared.repositories import webhooks
from tests.worker.waiting import eventually

URL = "https://example.org/hook"


@pytest.fixture
def hook(remote):
    return remote("webhooks", "create", URL).out.split()[0]


@pytest.fixture
def worker(service):
    """Do in a thread what a worker does with the first delivery."""
    threads = []

    def attempt_soon(error):
        def attempt():
            due = eventually(lambda: service.do(webhooks.claim_delivery))
            service.do(webhooks.finish_delivery, due, error)

        threads.append(threading.Thread(target=attempt))
        threads[-1].start()

    yield attempt_soon
    for thread in threads:
        thread.join()


def test_a_webhook_is_created_listed_and_deleted(remote, client):
    made = remote("webhooks", "create", URL, "--event", "job.failed")
    identity, secret = made.out.split()
    assert secret.startswith("whsec_")
    assert f"rocket webhooks test {identity}" in made.err
    assert remote("webhooks", "list").out == f"{identity}  {URL}  job.failed\n"
    assert json.loads(remote("webhooks", "list", "--json").out)["data"][0]["id"] == identity
    assert remote("webhooks", "delete", identity).code == 0
    assert client.list_webhooks() == ()
    assert "no webhooks" in remote("webhooks", "list").err


@pytest.mark.parametrize(("error", "code", "said"), [(None, 0, "was accepted"), ("status 500", 75, "status 500")])
def test_a_test_says_what_the_receiver_answered(remote, hook, worker, error, code, said):
    worker(error)
    outcome = remote("webhooks", "test", hook)
    assert outcome.code == code
    assert said in outcome.out + outcome.err


def test_an_unknown_webhook_is_an_error(remote):
    assert "no webhook has this id" in remote("webhooks", "test", "x").err
    assert "no webhook has this id" in remote("webhooks", "delete", "hook_" + "0" * 26).err
