import threading
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from app.services import jobs, metrics
from app.shared.errors import DatabaseUnavailableError
from app.shared.outcomes import JobError
from tests.app.api.conftest import BODY
from tests.app.conftest import local_client
from tests.worker.waiting import eventually

UNKNOWN = "/jobs/job_" + "0" * 26


@pytest.fixture
def samples(client):
    """Return all samples by name and labels."""

    def samples():
        answer = client.get("/metrics")
        assert answer.status_code == 200
        families = list(text_string_to_metric_families(answer.text))
        assert len({family.name for family in families}) == len(families)
        assert all(family.documentation for family in families)
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    return samples


def requests(samples):
    """Return the number of requests by method, route and status."""
    return {
        tuple(dict(key[1:])[label] for label in ("method", "route", "status")): value
        for key, value in samples.items()
        if key[0] == "rocket_http_requests_total"
    }


def test_requests_are_counted_by_route_and_not_by_path(client, samples):
    client.get("/healthz")
    client.get("/healthz")
    client.get(UNKNOWN)
    client.get("/jobs/x%00y")
    client.get(f"{UNKNOWN}/artifacts/canary/canary")
    client.get("/canary")
    client.get("/canary/canary")
    client.request("CANARY", "/jobs")
    client.post("/jobs", json={})
    assert requests(samples()) == {
        ("GET", "/healthz", "200"): 2,
        ("GET", "/jobs/{job_id}", "404"): 2,
        ("GET", "/jobs/{job_id}/artifacts/{name:path}", "404"): 1,
        ("GET", "none", "404"): 2,
        ("other", "/jobs", "405"): 1,
        ("POST", "/jobs", "422"): 1,
    }
    assert "canary" not in client.get("/metrics").text.lower()


def test_each_request_is_timed(client, samples):
    for _ in range(3):
        client.get("/healthz")
    told = samples()
    labels = (("method", "GET"), ("route", "/healthz"))
    assert told["rocket_http_request_seconds_count", *labels] == 3
    assert 0 < told["rocket_http_request_seconds_sum", *labels] < 10


def test_an_unexpected_error_is_counted_as_a_server_error(client, samples, monkeypatch):
    def broken(*_, **__):
        raise ValueError("not foreseen")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "list_jobs", broken)
        assert client.get("/jobs").status_code == 500
    assert requests(samples()) == {("GET", "/jobs", "500"): 1}


def test_queue_metrics_match_the_queue(client, worker, samples):
    first, second, third = (client.post("/jobs", json=BODY).json()["id"] for _ in range(3))
    worker.claim(first)
    worker.fail(second, JobError(code="x", message="m"))
    worker.succeed(third, {"report.json": b"12345"})
    client.post("/jobs", json=BODY)
    told = samples()
    jobs = {tuple(value for _, value in key[1:]): count for key, count in told.items() if key[0] == "rocket_jobs"}
    assert {labels for labels, count in jobs.items() if count == 1} == {("cpu", "queued"), ("cpu", "running")}
    # Zeros too, because an alert could otherwise not distinguish none from unknown.
    assert sorted(jobs) == [
        (queue, status) for queue in ("cpu", "gpu") for status in ("cancelling", "queued", "running")
    ]
    assert told["rocket_outbox_rows",] == 4
    assert told["rocket_stored_bytes", ("kind", "artifacts")] == 5
    assert told["rocket_database_up",] == 1
    assert 0 <= told["rocket_longest_silence_seconds", ("queue", "cpu")] < 30
    assert 0 <= told["rocket_oldest_queued_seconds", ("queue", "cpu")] < 30


def test_without_a_database_process_metrics_are_served(client, samples, monkeypatch):
    def away(*_, **__):
        raise DatabaseUnavailableError("away")

    monkeypatch.setattr(metrics, "read_statistics", away)
    told = samples()
    assert told["rocket_database_up",] == 0
    assert not [key for key in told if key[0] in {"rocket_jobs", "rocket_outbox_rows"}]
    assert told["process_resident_memory_bytes",] > 2**20


def test_a_hanging_database_does_not_block_a_scrape(client, samples, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(metrics, "read_statistics", lambda *_, **__: release.wait(30) and None)
    monkeypatch.setattr(metrics, "_SECONDS", 0.5)
    began = time.monotonic()
    assert samples()["rocket_database_up",] == 0
    assert time.monotonic() - began < 15
    release.set()
    monkeypatch.undo()
    eventually(lambda: samples()["rocket_database_up",] == 1)


def test_openmetrics_is_served_on_request(client):
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")

    assert {family.name for family in parse_openmetrics(answer.text)} > {"rocket_http_requests", "rocket_jobs"}


def test_applications_have_separate_metrics(settings, client):
    client.get("/healthz")
    with local_client(create_app(settings)) as other:
        assert "/healthz" not in other.get("/metrics").text
