"""A hanging store, which delays only its downloads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2

from app.shared.storage import LocalStore
from tests.loopback_service import wait_for

# More than the threads that answer requests.
_DOWNLOADS = 48


def test_hanging_downloads_leave_threads_to_other_requests(server, service, monkeypatch):
    job_id = service.succeeded({"file": b"content"})
    waiting, end = [], threading.Event()

    def hang(_self, _key, _start, _stop):
        waiting.append(1)
        end.wait()
        yield b"content"

    monkeypatch.setattr(LocalStore, "read", hang)
    url = f"{server.url}/jobs/{job_id}"
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        downloads = [pool.submit(httpx2.get, f"{url}/artifacts/file", timeout=60) for _ in range(_DOWNLOADS)]
        try:
            wait_for(lambda: len(waiting) >= 32)
            began = time.monotonic()
            assert httpx2.get(url).status_code == 200
            assert time.monotonic() - began < 5
        finally:
            end.set()
        assert {download.result().content for download in downloads} == {b"content"}
