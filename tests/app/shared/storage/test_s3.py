"""Behaviour specific to S3, and stores that lack some of it."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from app.shared.errors import DiskFullError, InvalidSettingsError, StorageError, StorageUnavailableError
from app.shared.settings import Settings
from app.shared.storage import open_store
from app.shared.storage.s3 import S3Store

LONG = bytes(range(256)) * 4096 * 9


@pytest.fixture
def store(s3_settings, tmp_path):
    return open_store(Settings(data_dir=tmp_path, **s3_settings))


@pytest.fixture
def make_store(bucket):
    """Return a store at some address, with short timeouts."""

    def make_store(url):
        return S3Store("a-bucket", "p", endpoint_url=url, connect_seconds=0.2, answer_seconds=0.2, attempts=2)

    return make_store


@contextmanager
def answering(status, code):
    """Run a server that answers every request with an error."""

    class Handler(BaseHTTPRequestHandler):
        def refuse(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = refuse

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ACTIONS = {
    "put": lambda store: store.put_stream([b"abc"], max_bytes=3),
    "read": lambda store: list(store.read("a" * 32, 0, 3)),
    "remove": lambda store: store.remove("a" * 32),
    "keys": lambda store: store.keys(before=time.time()),
    "remove_unfinished": lambda store: store.remove_unfinished(before=time.time()),
    "is_bound_to": lambda store: store.is_bound_to("one"),
    "check": lambda store: store.check(),
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("is_listening", [True, False], ids=["hangs", "refuses"])
def test_an_unresponsive_store_is_reported_in_time(make_store, action, is_listening):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if is_listening:
            held.listen()
        store = make_store(f"http://127.0.0.1:{held.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(StorageUnavailableError):
            action(store)
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", StorageUnavailableError),
        (500, "InternalError", StorageUnavailableError),
        (403, "AccessDenied", StorageError),
        (507, "XMinioStorageFull", DiskFullError),
    ],
)
def test_a_refusal_has_its_own_error_and_names_no_bucket(make_store, status, code, kind):
    with answering(status, code) as url, pytest.raises(StorageError, match="store") as refused:
        ACTIONS["put"](make_store(url))
    assert type(refused.value) is kind
    assert "a-bucket" not in str(refused.value)
    assert url not in str(refused.value)


def test_corrupted_uploads_are_detected_and_removed(store, bucket):
    def tamper(**_options):
        (name,) = bucket.names()
        bucket.write(name, bytes([LONG[0] ^ 1]) + LONG[1:])

    store._client.meta.events.register("before-call.s3.HeadObject", tamper)
    with pytest.raises(StorageUnavailableError, match="different bytes"):
        store.put_stream([LONG], max_bytes=len(LONG))
    assert bucket.names() == []


@pytest.mark.parametrize("is_tampered", [False, True])
def test_without_sha256_support_the_content_is_read_back(store, bucket, is_tampered):
    def forget(parsed, **_options):
        parsed.pop("ChecksumSHA256")
        if is_tampered:
            (name,) = bucket.names()
            bucket.write(name, b"xyz")

    store._client.meta.events.register("after-call.s3.HeadObject", forget)
    if is_tampered:
        with pytest.raises(StorageUnavailableError, match="different bytes"):
            store.put_stream([b"abc"], max_bytes=3)
        assert bucket.names() == []
    else:
        assert bucket.read(f"rocket/test/artifacts/{store.put_stream([b'abc'], max_bytes=3).key}") == b"abc"


def test_a_presigned_url_downloads_the_file(store):
    stored = store.put_stream([b"abcdef"], max_bytes=6)
    url = store.presigned_url(stored.key, filename="a b.md", media_type="text/markdown")
    assert "X-Amz-Expires=300" in url
    assert "not-secret" not in url
    answer = httpx2.get(url, headers={"Range": "bytes=2-"})
    assert (answer.status_code, answer.content) == (206, b"cdef")
    assert answer.headers["Content-Disposition"] == "attachment; filename*=utf-8''a%20b.md"
    assert answer.headers["Content-Type"] == "text/markdown"


def test_missing_credentials_are_named(store, s3_settings, monkeypatch, tmp_path):
    from app.shared.storage import s3

    s3._session.cache_clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    try:
        with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
            open_store(Settings(data_dir=tmp_path, **s3_settings)).check()
    finally:
        s3._session.cache_clear()


def test_a_missing_library_is_reported_with_what_to_install(s3_settings, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "app.shared.storage.s3")
    with pytest.raises(InvalidSettingsError, match=r"pip install 'rocket-compress\[s3\]'"):
        open_store(Settings(data_dir=tmp_path, **s3_settings))


def test_a_local_store_does_not_load_the_s3_library():
    code = "import sys, app.main; sys.exit(any(name in sys.modules for name in ('boto3', 'botocore')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
