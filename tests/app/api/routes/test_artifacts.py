import asyncio
import base64
import contextlib
import email
import email.policy
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, RangeNotSatisfiable

from app.api.file_responses import requested_ranges
from app.shared.errors import StorageUnavailableError
from app.shared.repositories import sweeps

pytestmark = pytest.mark.databases("sqlite", soak=("postgres",))

CONTENT = bytes(range(256)) * 10
NAME = "rocket/model.safetensors"


def raw_status(app, path):
    """Return the status for a path that no client has normalized."""
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


@pytest.fixture(params=["local", "s3"])
def store_settings(request):
    return {} if request.param == "local" else request.getfixturevalue("s3_settings")


@pytest.fixture
def stored_keys(context):
    return lambda: context.artifacts.keys(before=time.time() + 60)


@pytest.fixture
def done(submitted, worker):
    worker.succeed(submitted, {NAME: CONTENT, "report.json": b"{}"})
    return f"/jobs/{submitted}"


@pytest.fixture
def url(done):
    return f"{done}/artifacts/{NAME}"


def test_the_manifest_lists_every_file_with_size_and_hash(client, done):
    listed = client.get(f"{done}/artifacts").json()["data"]
    assert [file["name"] for file in listed] == ["report.json", NAME]
    assert listed[1]["size"] == len(CONTENT)
    assert listed[1]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert {"name", "size", "sha256", "media_type"} <= set(listed[1])


def test_the_earlier_name_of_an_export_still_finds_its_files(client, done):
    assert client.get(f"{done}/artifacts/{NAME.replace('rocket/', 'factored/')}").content == CONTENT


def test_a_file_is_downloaded_whole_with_its_digest(client, url):
    answer = client.get(url)
    digest = hashlib.sha256(CONTENT)
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["ETag"] == f'"sha256-{digest.hexdigest()}"'
    assert answer.headers["Repr-Digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert answer.headers["Content-Length"] == str(len(CONTENT))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="model.safetensors"'
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_head_answers_like_get_without_a_body(client, url):
    head, get = client.head(url), client.get(url)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("ETag", "Content-Length", "Accept-Ranges", "Content-Type"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize(
    ("asked", "slice_"),
    [("bytes=0-9", slice(0, 10)), ("bytes=2000-", slice(2000, None)), ("bytes=-7", slice(-7, None))],
)
def test_a_range_returns_that_part(client, url, asked, slice_):
    answer = client.get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, CONTENT[slice_])
    assert answer.headers["Content-Range"].endswith(f"/{len(CONTENT)}")


def test_a_download_resumed_at_any_byte_is_complete(client, url):
    for cut in (1, 255, len(CONTENT) - 1):
        etag = client.head(url).headers["ETag"]
        rest = client.get(url, headers={"Range": f"bytes={cut}-", "If-Range": etag})
        assert rest.status_code == 206
        assert CONTENT[:cut] + rest.content == CONTENT


def test_an_outdated_if_range_returns_the_whole_file(client, url):
    answer = client.get(url, headers={"Range": "bytes=5-", "If-Range": '"sha256-other"'})
    assert (answer.status_code, answer.content) == (200, CONTENT)


def test_a_range_beyond_the_file_is_a_416_with_its_size(client, url):
    for asked in (f"bytes={len(CONTENT)}-", "bytes=-0"):
        answer = client.get(url, headers={"Range": asked})
        assert (answer.status_code, answer.json()["code"]) == (416, "range_not_satisfiable")
        assert answer.headers["Content-Range"] == f"bytes */{len(CONTENT)}"


def test_ranges_beyond_the_file_are_dropped(client, url):
    answer = client.get(url, headers={"Range": f"bytes={len(CONTENT)}-,1-2"})
    assert (answer.status_code, answer.content) == (206, CONTENT[1:3])


@pytest.mark.parametrize(
    ("asked", "parts"),
    [("bytes=0-1,10-19,-5", [(0, 2), (10, 20), (-5, None)]), ("bytes=30-40, 0-9,5-12", [(0, 13), (30, 41)])],
)
def test_several_ranges_return_those_parts(client, url, asked, parts):
    answer = client.get(url, headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.headers["Content-Length"] == str(len(answer.content))
    head = f"Content-Type: {answer.headers['Content-Type']}\r\n\r\n".encode()
    sent = email.message_from_bytes(head + answer.content, policy=email.policy.HTTP).iter_parts()
    assert [part.get_payload(decode=True) for part in sent] == [CONTENT[slice(*part)] for part in parts]


@given(header=st.text("bytes=0123456789-, ", max_size=30), size=st.integers(0, 50))
@example(header="bytes=" + "9" * 5000 + "-", size=5)
def test_ranges_are_parsed_as_the_framework_does(header, size):
    ours = []
    with contextlib.suppress(HTTPException):
        ours = [(part.start, part.stop) for part in requested_ranges(header, size)]
    if ours:
        assert all(0 <= start < stop <= size for start, stop in ours)
        with contextlib.suppress(RangeNotSatisfiable):
            assert ours == FileResponse._parse_range_header(header, size)


def test_many_parts_can_be_fetched_at_once(client, url):
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(
            lambda start: client.get(url, headers={"Range": f"bytes={start}-{start + 99}"}).content,
            range(0, len(CONTENT), 100),
        )
        assert b"".join(parts) == CONTENT


def test_an_unavailable_store_is_a_503_without_its_address(client, url, context, monkeypatch):
    def gone(*_arguments):
        raise StorageUnavailableError("the artifact store does not answer")
        yield

    monkeypatch.setattr(type(context.artifacts), "read", gone)
    answer = client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
    assert "Retry-After" in answer.headers


@pytest.mark.parametrize(
    "asked", ["garbage", "bytes=", "bytes=x-y", "lines=1-2", "bytes=9-1", "bytes=" + ",".join(["0-"] * 9)]
)
def test_malformed_or_excessive_ranges_are_ignored(client, url, asked):
    answer = client.get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, CONTENT)


@pytest.mark.parametrize("pattern", ["{}", "W/{}", '"other", {}', "*"])
def test_a_matching_etag_is_not_modified(client, url, pattern):
    etag = client.head(url).headers["ETag"]
    answer = client.get(url, headers={"If-None-Match": pattern.format(etag)})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["ETag"] == etag


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("wanted", ['"other"', "W/{}", '"a", "b"', "other"])
def test_a_version_other_than_the_wanted_one_is_a_412(client, url, method, wanted):
    etag = client.head(url).headers["ETag"]
    answer = client.request(method, url, headers={"If-Match": wanted.format(etag), "If-None-Match": etag})
    assert answer.status_code == 412
    if method == "GET":
        assert answer.json()["code"] == "precondition_failed"


@pytest.mark.parametrize("wanted", ["{}", "*", '"other", {}'])
def test_the_wanted_version_is_sent(client, url, wanted):
    etag = client.head(url).headers["ETag"]
    # Conditions on the time are for clients that know no tag.
    headers = {"If-Match": wanted.format(etag), "If-Unmodified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"}
    assert client.get(url, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("name", "seconds", "status"),
    [
        *(("If-Unmodified-Since", 0, 200), ("If-Unmodified-Since", -1, 412)),
        *(("If-Modified-Since", 0, 304), ("If-Modified-Since", -1, 200)),
    ],
)
def test_conditions_on_the_time_hold_to_the_second(client, url, name, seconds, status):
    changed = parsedate_to_datetime(client.head(url).headers["Last-Modified"])
    since = format_datetime(changed + timedelta(seconds=seconds), usegmt=True)
    assert client.get(url, headers={name: since}).status_code == status


@pytest.mark.parametrize("name", ["If-Unmodified-Since", "If-Modified-Since"])
def test_a_condition_that_is_no_date_is_ignored(client, url, name):
    assert client.get(url, headers={name: "yesterday"}).status_code == 200


def test_another_etag_returns_the_file(client, url):
    assert client.get(url, headers={"If-None-Match": '"sha256-other"'}).status_code == 200


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
        "rocket/../../rocket.sqlite3",
        "rocket/model.safetensors%00",
        "rocket/model.safetensors%23",
        "rocket//model.safetensors",
        "FACTORED/model.safetensors",
        "",
        "%",
    ],
)
def test_only_an_artifact_name_finds_a_file(client, app, done, name):
    assert raw_status(app, f"{done}/artifacts/{name}") == 404


def test_an_expired_artifact_is_gone_but_still_listed(client, submitted, worker, context):
    worker.succeed(submitted, {NAME: CONTENT}, retention=timedelta(0))
    for key in worker.do(sweeps.expire_artifacts):
        context.artifacts.remove(key)
    answer = client.get(f"/jobs/{submitted}/artifacts/{NAME}")
    assert (answer.status_code, answer.json()["code"]) == (410, "artifact_expired")
    assert len(client.get(f"/jobs/{submitted}/artifacts").json()["data"]) == 1


def test_a_lost_file_is_a_server_error(client, url, context, stored_keys):
    for key in stored_keys():
        context.artifacts.remove(key)
    answer = client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (500, "storage_error")
    # Clients must not learn where the service stores its files.
    assert str(context.settings.data_dir) not in answer.text
    # A HEAD request must not promise a file that is missing.
    assert client.head(url).status_code == 500


def test_a_job_without_result_has_no_artifacts_and_no_report(client, submitted):
    assert client.get(f"/jobs/{submitted}/artifacts").json() == {"data": []}
    answer = client.get(f"/jobs/{submitted}/report")
    assert (answer.status_code, answer.json()["code"]) == (409, "report_not_ready")


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_the_report_is_json(client, done, report, accept):
    answer = client.get(f"{done}/report", headers={"Accept": accept})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == report.model_dump(mode="json")
