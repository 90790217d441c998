"""Clients that send requests at the same moment, over sockets."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.app.api.conftest import BODY

pytestmark = pytest.mark.databases("sqlite", "postgres")


CLIENTS = 50


def at_once(url, bodies, key):
    """Submit all at the same moment, each over its own connection, and again if too many are judged at once."""
    together = threading.Barrier(len(bodies))

    def submit(body):
        with httpx2.Client(base_url=url, timeout=180) as client:
            client.get("/healthz")
            together.wait()
            end = time.monotonic() + 60
            while True:
                answer = client.post("/jobs", json=body, headers={"Idempotency-Key": key})
                if answer.status_code != 429 or time.monotonic() > end:
                    return answer
                time.sleep(0.2)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(submit, bodies))


def test_fifty_concurrent_requests_with_one_key_make_one_job(url):
    answers = at_once(url, [BODY] * CLIENTS, "one")
    assert Counter(answer.status_code for answer in answers) == {202: 1, 200: CLIENTS - 1}
    [job_id] = {answer.json()["id"] for answer in answers}
    assert [job["id"] for job in httpx2.get(f"{url}/jobs").json()["data"]] == [job_id]
    events = httpx2.get(f"{url}/jobs/{job_id}/events").json()["data"]
    assert [event["data"]["status"] for event in events] == ["queued"]


def test_of_two_requests_with_one_key_only_one_makes_a_job(url):
    answers = at_once(url, [BODY, BODY | {"ratio": 0.4}] * 10, "shared")
    [job] = httpx2.get(f"{url}/jobs").json()["data"]
    won = [answer for answer in answers if answer.status_code in {200, 202}]
    refused = [answer for answer in answers if answer.status_code == 422]
    assert (len(won), len(refused)) == (10, 10)
    assert {answer.json()["id"] for answer in won} == {job["id"]}
    assert {answer.json()["code"] for answer in refused} == {"idempotency_key_reused"}
