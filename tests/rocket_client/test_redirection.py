"""Downloads from a server that sends its clients to the store."""

import hashlib

import httpx2
import pytest

from app.shared.models import LOCAL_OWNER
from app.shared.repositories import keys
from rocket_client.errors import DigestMismatchError, StoreUnreachableError
from tests.loopback_service import Service

pytestmark = pytest.mark.both_clients

WEIGHTS = bytes(range(256)) * 4096
FILES = {"rocket/model.safetensors": WEIGHTS, "report.json": b"{}", "empty": b""}


@pytest.fixture
def service(service, s3_settings):
    sending = Service(service.settings.model_copy(update={**s3_settings, "redirect_downloads": True}))
    yield sending
    sending.close()


@pytest.fixture
def job_id(service):
    return service.succeeded(FILES)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def at_store(monkeypatch):
    """Record the requests of this process's HTTP client to the store."""
    sent = []

    def spy_on(kind):
        real = kind.stream

        def spy(self, method, url, **options):
            request = self.build_request(method, url, headers=options.get("headers"))
            if "X-Amz-Signature" in str(request.url):
                sent.append(dict(request.headers))
            return real(self, method, url, **options)

        monkeypatch.setattr(kind, "stream", spy)

    spy_on(httpx2.Client)
    spy_on(httpx2.AsyncClient)
    return sent


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_files_come_from_the_store_unchanged(client, job_id, folder, at_store):
    client.download(job_id, folder)
    assert contents(folder) == FILES
    assert len(at_store) == 2, "an empty file needs no bytes"


def test_a_partial_file_is_resumed_at_the_store(client, job_id, folder, at_store):
    (folder / "rocket").mkdir(parents=True)
    (folder / "rocket/model.safetensors.part").write_bytes(WEIGHTS[:1000])
    told = []
    client.download(job_id, folder, on_progress=told.append)
    assert contents(folder) == FILES
    assert told[-1].received == sum(map(len, FILES.values())) - 1000
    assert "bytes=1000-" in [headers.get("range") for headers in at_store]


def test_no_credentials_are_sent_to_the_store(connect, server, service, job_id, folder, at_store):
    with service.database.transaction() as session:
        key = keys.create_key(session, LOCAL_OWNER).text
    with connect(server.url, api_key=key) as client:
        client._client._transport.connections.http.cookies.set("session", "secret")
        client.download(job_id, folder)
    assert at_store
    for headers in at_store:
        assert not {"authorization", "cookie", "if-range"} & set(headers)
        assert "secret" not in str(headers)
        assert key not in str(headers)


def test_corrupted_bytes_at_the_store_are_refused(client, job_id, folder, bucket):
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    (name,) = [name for name in bucket.names() if bucket.read(name) == WEIGHTS]
    bucket.write(name, bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:])
    with pytest.raises(DigestMismatchError, match=digest):
        client.download(job_id, folder)
    assert "rocket/model.safetensors" not in contents(folder)


def test_a_missing_file_is_reported_without_its_signed_url(client, job_id, folder, bucket):
    for name in bucket.names():
        bucket.remove(name)
    with pytest.raises(StoreUnreachableError, match=r"status 40[34]") as gone:
        client.download(job_id, folder)
    assert "Signature" not in str(gone.value)


def test_unauthorized_clients_are_not_redirected(server, service, job_id):
    sent = httpx2.get(f"{server.url}/jobs/{job_id}/artifacts/report.json")
    assert (sent.status_code, sent.headers["cache-control"]) == (307, "no-store")
    for path in (f"/jobs/{job_id}/artifacts/other", f"/jobs/job_{'0' * 26}/artifacts/report.json"):
        refused = httpx2.get(server.url + path)
        assert refused.status_code == 404
        assert "location" not in refused.headers


def test_a_browser_saves_the_file_under_its_name(server, job_id):
    answer = httpx2.get(f"{server.url}/jobs/{job_id}/artifacts/rocket/model.safetensors", follow_redirects=True)
    assert answer.content == WEIGHTS
    assert "model.safetensors" in answer.headers["content-disposition"]
    assert answer.headers["content-type"] == "application/octet-stream"


def test_an_outdated_if_range_is_not_redirected_to_the_store(server, job_id):
    headers = {"Range": "bytes=5-", "If-Range": '"sha256-other"'}
    answer = httpx2.get(f"{server.url}/jobs/{job_id}/artifacts/rocket/model.safetensors", headers=headers)
    assert (answer.status_code, answer.content) == (200, WEIGHTS)


def test_a_head_request_is_answered_by_the_server(server, job_id):
    answer = httpx2.head(f"{server.url}/jobs/{job_id}/artifacts/rocket/model.safetensors")
    assert (answer.status_code, answer.headers["content-length"]) == (200, str(len(WEIGHTS)))
