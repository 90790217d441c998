import asyncio
import base64
import hashlib
from datetime import timedelta
from urllib.parse import unquote

import pytest

from app.shared.repositories import sweeps

pytestmark = pytest.mark.databases("sqlite", "postgres")

CONTENT = bytes(range(256)) * 10
NAME = "factored/model.safetensors"


def raw_status(app, path):
    """What the service answers to a path that no client has tidied up."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "query_string": b""}
    scope |= {"http_version": "1.1", "asgi": {"version": "3.0"}, "scheme": "http", "root_path": ""}
    scope |= {"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 50000)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"]


@pytest.fixture
def done(submitted, worker):
    worker.succeed(submitted, {NAME: CONTENT, "report.json": b"{}"})
    return f"/jobs/{submitted}"


@pytest.fixture
def url(done):
    return f"{done}/artifacts/{NAME}"


def test_the_manifest_names_every_file_with_size_and_hash(client, done):
    listed = client.get(f"{done}/artifacts").json()["data"]
    assert [file["name"] for file in listed] == [NAME, "report.json"]
    assert listed[0]["size"] == len(CONTENT)
    assert listed[0]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert {"name", "size", "sha256", "media_type"} <= set(listed[0])


def test_a_file_is_downloaded_whole_with_what_proves_it(client, url):
    answer = client.get(url)
    digest = hashlib.sha256(CONTENT)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["ETag"] == f'"sha256-{digest.hexdigest()}"'
    assert answer.headers["Repr-Digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert answer.headers["Content-Length"] == str(len(CONTENT))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="model.safetensors"'
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_head_is_the_get_without_its_body(client, url):
    head, get = client.head(url), client.get(url)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("ETag", "Content-Length", "Accept-Ranges", "Content-Type"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize(
    ("asked", "slice_"),
    [("bytes=0-9", slice(0, 10)), ("bytes=2000-", slice(2000, None)), ("bytes=-7", slice(-7, None))],
)
def test_a_range_is_that_part(client, url, asked, slice_):
    answer = client.get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, CONTENT[slice_])
    assert answer.headers["Content-Range"].endswith(f"/{len(CONTENT)}")


def test_a_download_resumed_at_any_byte_is_the_file(client, url):
    for cut in (1, 255, len(CONTENT) - 1):
        etag = client.head(url).headers["ETag"]
        rest = client.get(url, headers={"Range": f"bytes={cut}-", "If-Range": etag})
        assert rest.status_code == 206
        assert CONTENT[:cut] + rest.content == CONTENT


def test_a_range_of_another_content_is_the_whole_file(client, url):
    answer = client.get(url, headers={"Range": "bytes=5-", "If-Range": '"sha256-other"'})
    assert (answer.status_code, answer.content) == (200, CONTENT)


def test_a_range_beyond_the_file_is_a_problem_that_says_how_large_it_is(client, url):
    for asked in (f"bytes={len(CONTENT)}-", "bytes=-0"):
        answer = client.get(url, headers={"Range": asked})
        assert (answer.status_code, answer.json()["code"]) == (416, "range_not_satisfiable")
        assert answer.headers["Content-Range"] == f"bytes */{len(CONTENT)}"


@pytest.mark.parametrize(
    "asked", ["garbage", "bytes=", "bytes=x-y", "lines=1-2", "bytes=9-1", "bytes=" + ",".join(["0-"] * 9)]
)
def test_a_range_that_means_nothing_or_too_much_is_ignored(client, url, asked):
    answer = client.get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, CONTENT)


@pytest.mark.parametrize("pattern", ["{}", "W/{}", '"other", {}', "*"])
def test_what_the_client_has_already_is_not_sent_again(client, url, pattern):
    etag = client.head(url).headers["ETag"]
    answer = client.get(url, headers={"If-None-Match": pattern.format(etag)})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["ETag"] == etag


def test_what_the_client_has_not_is_sent(client, url):
    assert client.get(url, headers={"If-None-Match": '"sha256-other"'}).status_code == 200


def test_the_etag_survives_a_touch_of_the_file(client, url, context):
    before = client.head(url).headers["ETag"]
    for file in (context.settings.data_dir / "artifacts").iterdir():
        file.touch()
    assert client.head(url).headers["ETag"] == before


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../rocket.sqlite3",
        "%2e%2e/rocket.sqlite3",
        "..%2frocket.sqlite3",
        "..%5crocket.sqlite3",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "factored/../../rocket.sqlite3",
        "factored/model.safetensors%00",
        "factored/model.safetensors%23",
        "factored//model.safetensors",
        "FACTORED/model.safetensors",
        "",
        "%",
    ],
)
def test_nothing_but_the_name_of_an_artifact_finds_a_file(client, app, done, name):
    assert raw_status(app, f"{done}/artifacts/{name}") == 404


def test_an_expired_artifact_is_gone_and_still_listed(client, submitted, worker, context):
    worker.succeed(submitted, {NAME: CONTENT}, retention=timedelta(0))
    for key in worker.do(sweeps.expire_artifacts):
        context.artifacts.remove(key)
    answer = client.get(f"/jobs/{submitted}/artifacts/{NAME}")
    assert (answer.status_code, answer.json()["code"]) == (410, "artifact_expired")
    assert len(client.get(f"/jobs/{submitted}/artifacts").json()["data"]) == 1


def test_a_file_that_was_lost_is_an_error_of_the_service(client, url, context):
    for file in (context.settings.data_dir / "artifacts").iterdir():
        file.unlink()
    answer = client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (500, "storage_error")
    # Where the service keeps its files is nobody else's business.
    assert str(context.settings.data_dir) not in answer.text


def test_a_job_without_a_result_has_no_artifacts_and_no_report(client, submitted):
    assert client.get(f"/jobs/{submitted}/artifacts").json() == {"data": []}
    answer = client.get(f"/jobs/{submitted}/report")
    assert (answer.status_code, answer.json()["code"]) == (409, "report_not_ready")


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_the_report_is_json(client, done, report, accept):
    answer = client.get(f"{done}/report", headers={"Accept": accept})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == report.model_dump(mode="json")
