import json
import socket
import threading
import time

import pytest

from app.shared.outcomes import JobError
from rocket_client import models
from rocket_client._transport import Transport
from rocket_client.errors import (
    InvalidArgumentError,
    ProblemError,
    ServerUnreachableError,
    UnexpectedAnswerError,
)
from rocket_core.errors import HubUnavailableError
from rocket_core.report.schema import CompressionReport
from tests.loopback_service import FACTORED, free_port
from tests.rocket_cli.fakes import REGRESSED, build_report

UNKNOWN = "job_" + "0" * 26

pytestmark = pytest.mark.both_clients


class Relay:
    """A relay between client and server that loses the first responses."""

    def __init__(self, server_url, *, lost):
        self._port = int(server_url.rsplit(":", 1)[1])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lost = lost
        self.requests = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, socket.create_connection(("127.0.0.1", self._port)) as onward:
                # One request per connection: the client sends it in one or two pieces, and none is longer.
                request = connection.recv(65536)
                head, _, body = request.partition(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                while len(body) < length:
                    body += connection.recv(65536)
                self.requests.append(head.decode())
                onward.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
                answer = b"".join(iter(lambda: onward.recv(65536), b""))
                if len(self.requests) > self._lost:
                    connection.sendall(answer)

    def close(self):
        self._listener.close()


@pytest.fixture
def relay(server):
    made = []

    def relay(*, lost):
        made.append(Relay(server.url, lost=lost))
        return made[-1]

    yield relay
    for one in made:
        one.close()


def test_a_job_is_submitted_with_the_defaults_of_the_server(client):
    job = client.submit("local/tiny", ratio=0.3)

    assert (job.status, job.model_id, job.ratio, job.progress) == ("queued", "local/tiny", 0.3, 0)
    assert job.calibration == models.Calibration(dataset="builtin", samples=256, sequence_length=None, seed=0)
    assert job.options["export"] == ["rocket"]
    assert not job.has_ended
    assert client.get_job(job.id) == job


def test_every_option_reaches_the_server(client):
    job = client.submit(
        "local/tiny",
        ratio=0.2,
        calibration={"dataset": "local/mine.jsonl", "samples": 3, "sequence_length": 64, "seed": 1},
        options={"objective": "whitened", "ignore": ["*.q_proj"], "export": ["dense"]},
        metadata={"team": "ours"},
    )

    assert job.calibration == models.Calibration(dataset="local/mine.jsonl", samples=3, sequence_length=64, seed=1)
    assert (job.options["objective"], job.options["ignore"]) == ("whitened", ["*.q_proj"])
    assert job.metadata == {"team": "ours"}


def test_bounds_are_sent_and_the_verdict_is_returned(client, service):
    bounds = {"max_kl": 0.05}
    job = client.submit("local/tiny", ratio=0.3, evaluate={}, accept=bounds)
    assert job.accept.model_dump(exclude_none=True) == bounds
    assert client.estimate("local/tiny", ratio=0.3, evaluate={}, accept=bounds).kept_parameters > 0
    for create in (client.submit, client.estimate):
        with pytest.raises(ProblemError, match="give at least one of max_kl"):
            create("local/tiny", ratio=0.3, evaluate={}, accept={})
    service.succeed(service.claim(job.id), {}, verdict=REGRESSED)
    ended = client.wait(job.id)
    assert (ended.status, ended.result.verdict) == ("succeeded", REGRESSED)


def test_one_idempotency_key_makes_one_job(client):
    jobs = {client.submit("local/tiny", ratio=0.3, idempotency_key="k").id for _ in range(2)}
    others = {client.submit("local/tiny", ratio=0.3).id for _ in range(2)}

    assert len(jobs) == 1
    assert len(others) == 2


def test_a_request_whose_response_is_lost_makes_one_job(connect, service, relay):
    with connect(relay(lost=2).url, patience=10) as client:
        job = client.submit("local/tiny", ratio=0.3)

    assert service.count_jobs() == 1
    assert client.server
    assert job.status == "queued"


def test_a_deletion_whose_response_is_lost_is_not_repeated(connect, service, relay):
    job_id = service.succeeded({})
    between = relay(lost=1)

    with connect(between.url, patience=10) as client, pytest.raises(ServerUnreachableError):
        client.delete(job_id)

    assert len(between.requests) == 1


def test_jobs_are_listed_page_by_page_newest_first(client, service):
    ids = [service.submit() for _ in range(102)]

    page = client.list_jobs(limit=2)
    assert [job.id for job in page.data] == ids[:-3:-1]
    assert (page.has_more, page.last_id) == (True, ids[-2])
    assert [job.id for job in client.list_jobs(after=page.last_id, limit=1).data] == [ids[-3]]
    assert [job.id for job in client.iterate_jobs()] == ids[::-1]
    assert list(client.iterate_jobs(status="failed")) == []


def test_jobs_can_be_filtered_by_labels(client):
    ours, others = (client.submit("local/tiny", ratio=0.3, metadata={"team": team, "a b": "1"}) for team in "ab")

    assert [job.id for job in client.iterate_jobs(metadata={"team": "a", "a b": "1"})] == [ours.id]
    assert client.list_jobs(metadata={"team": "c"}).data == ()
    assert len(client.list_jobs(metadata={}).data) == 2
    assert others.metadata["team"] == "b"


def test_a_job_can_be_cancelled_retried_and_deleted(client):
    job = client.submit("local/tiny", ratio=0.3)

    cancelled = client.cancel(job.id)
    assert (cancelled.status, cancelled.has_ended) == ("cancelled", True)
    retried = client.retry(job.id)
    assert (retried.status, retried.retry_of) == ("queued", job.id)
    client.delete(job.id)
    with pytest.raises(ProblemError) as refused:
        client.get_job(job.id)
    assert (refused.value.status, refused.value.code) == (404, "job_not_found")


def test_the_results_of_a_job_can_be_read(client, service):
    job_id = service.submit()
    lease = service.claim(job_id)
    service.profile(lease, "model.layers.0.q")
    service.succeed(lease, {"rocket/config.json": b"{}"})

    (layer,) = client.layers(job_id)
    assert (layer.name, layer.d_in, len(layer.candidates)) == ("model.layers.0.q", 8, 2)
    assert layer.chosen.model_dump() == FACTORED.model_dump()
    assert client.report(job_id) == build_report()
    (artifact,) = client.artifacts(job_id)
    assert (artifact.name, artifact.size) == ("rocket/config.json", 2)
    assert client.get_job(job_id).result.kept_parameters == 7_000_000


def test_a_failed_job_has_its_error(client, service):
    job_id = service.submit()
    service.fail(service.claim(job_id), JobError(code="insufficient_disk", message="full", stage="exporting"))

    error = client.get_job(job_id).error
    assert (error.code, error.message, error.stage, error.layer) == ("insufficient_disk", "full", "exporting", None)


def test_models_and_datasets_are_listed(client):
    assert client.models() == ["local/tiny"]
    assert {"builtin", "wikitext2", "local/mine.jsonl"} <= set(client.calibrations())


def test_a_refusal_has_the_members_of_the_problem_document(client):
    with pytest.raises(ProblemError) as refused:
        client.submit("local/tiny", ratio=1.5)

    error = refused.value
    assert (error.status, error.code, error.param) == (422, "invalid_request", "ratio")
    assert "less than 1" in str(error)
    assert error.request_id


def test_an_unreachable_server_is_reported_within_the_patience(connect):
    url, waits = f"http://127.0.0.1:{free_port()}", []
    began = time.monotonic()

    with connect(url, patience=0.6, on_retry=waits.append) as client, pytest.raises(ServerUnreachableError) as gone:
        client.list_jobs()

    assert 0.5 < time.monotonic() - began < 3
    assert len(waits) >= 2
    assert waits[0].reason == "Connection refused"
    assert "rocket serve" in str(gone.value)
    assert url in str(gone.value)


def test_a_retry_to_a_busy_server_uses_the_same_key(connect, server, service, monkeypatch):
    monkeypatch.setattr("app.api.problems.RETRY_AFTER_SECONDS", 1)
    context = server.application.state.context
    admit, asked = type(context.admission).admit, []

    def hub_is_down_once(self, *arguments):
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise HubUnavailableError("later")
        return admit(self, *arguments)

    monkeypatch.setattr(type(context.admission), "admit", hub_is_down_once)

    with connect(server.url, patience=5) as client:
        client.submit("local/tiny", ratio=0.3)

    assert asked[1] - asked[0] >= 1
    assert service.count_jobs() == 1


def test_a_permanent_refusal_is_not_retried(connect, server):
    waits = []
    with connect(server.url, on_retry=waits.append) as client, pytest.raises(ProblemError):
        client.get_job(UNKNOWN)

    assert waits == []


@pytest.mark.parametrize("address", ["localhost:8000", "127.0.0.1", "ftp://host", "http://", "http://ho st:x"])
def test_an_invalid_address_is_refused(connect, address):
    with pytest.raises(InvalidArgumentError, match="http://HOST:PORT"):
        connect(address)


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "../healthz", "x?y", "x%2Fy"])
def test_an_id_that_would_change_the_path_is_not_sent(connect, job_id):
    with connect("http://127.0.0.1:1") as client:
        for call in (client.get_job, client.cancel, client.delete, client.layers, client.artifacts):
            with pytest.raises(InvalidArgumentError, match="not a job id"):
                call(job_id)


def test_invalid_numbers_and_keys_are_not_sent(connect):
    with connect("http://127.0.0.1:1") as client:
        with pytest.raises(InvalidArgumentError, match="ratio"):
            client.submit("local/tiny", ratio=float("nan"))
        with pytest.raises(InvalidArgumentError, match="ASCII"):
            client.submit("local/tiny", ratio=0.3, idempotency_key="ü")


def test_the_address_comes_from_the_environment(connect, server, monkeypatch):
    monkeypatch.setenv("ROCKET_SERVER", server.url + "/")

    with connect() as client:
        assert client.models() == ["local/tiny"]
        assert client.server == server.url


def test_a_proxy_from_the_environment_is_not_used_for_loopback(connect, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")

    with connect(server.url, patience=0) as client:
        assert client.models() == ["local/tiny"]


def test_another_service_at_the_address_is_detected(connect, server, monkeypatch):
    with connect(server.url + "/jobs", patience=0) as client, pytest.raises(ProblemError):
        client.list_jobs()
    # This service uses HTTP as well, but its OpenAPI document is not a list of jobs.
    get = Transport.get
    monkeypatch.setattr(Transport, "get", lambda self, answer, _path, _params: get(self, answer, "/openapi.json"))
    with connect(server.url, patience=0) as client, pytest.raises(UnexpectedAnswerError, match="JobPage"):
        client.list_jobs()


def test_unknown_members_of_a_newer_server_are_ignored(client):
    answer = client.submit("local/tiny", ratio=0.3).model_dump(mode="json")
    newer = answer | {"status": "hibernating", "price": 3, "calibration": answer["calibration"] | {"mixture": []}}

    job = models.Job.model_validate(newer)
    assert job.status == "hibernating"
    assert job.calibration.dataset == "builtin"
    report = json.loads(build_report().model_dump_json()) | {"energy": 5}
    report["totals"]["joules"] = 5
    assert client._client._transport.wire.parse(json.dumps(report), CompressionReport) == build_report()
