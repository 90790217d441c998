"""A model hub on the loopback interface: the few requests that are sent to the real one, and its ways to refuse."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "c0ff"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class FakeHub:
    """Repositories by id, each the content of its files.

    Attributes:
        repositories: the existing repositories.
        refusals: a path's beginning, the status it is answered with, and the Hub's code for it.
        silent: beginnings of paths that are never answered.
        trickle: beginnings of paths that are answered a byte at a time.
        ranges: whether parts of files are sent.
        lengths: whether whole files are sent with their length.
        announced: sizes that the listing gives to files instead of the real ones.
        asked: paths, with the token and the range of each request.
    """

    def __init__(self):
        self.repositories, self.refusals, self.silent, self.trickle = {}, [], [], []
        self.ranges = self.lengths = True
        self.announced = {}
        self.asked = []
        self.stopped = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub._answer(self)

            # The headers of a file are requested separately.
            def do_HEAD(self):
                hub._answer(self)

            def log_message(self, *_arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    @staticmethod
    def replace(monkeypatch, url):
        """Make the Hub's client use another address, as HF_ENDPOINT does at the start of a process."""
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    def replace_the_hub(self, monkeypatch):
        """Make the Hub's client use this server."""
        self.replace(monkeypatch, self.url)

    def __exit__(self, *_):
        if self.stopped.is_set():
            return
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request):
        path = request.path.partition("?")[0]
        self.asked.append((path, request.headers.get("Authorization"), request.headers.get("Range")))
        if path.startswith(tuple(self.silent)):
            self.stopped.wait(30)
            request.close_connection = True
            return None
        for start, status, code in self.refusals:
            if path.startswith(start):
                return _send(request, status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
        listed = re.fullmatch(rf"/api/models/([^/]+/[^/]+)/tree/{COMMIT}", path)
        if listed:
            return self._tree(request, listed[1])
        known = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if known:
            return self._info(request, *known.groups())
        tree = re.fullmatch(rf"/api/models/([^/]+/[^/]+)/tree/{COMMIT}", path)
        if tree:
            return self._tree(request, self.repositories[tree[1]])
        file = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path)
        content = self.repositories.get(file[1], {}).get(file[2]) if file else None
        if content is None:
            return _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(request, content)

    def _info(self, request, model, revision):
        if model not in self.repositories:
            return _send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in {None, "main", "v1", COMMIT}:
            return _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        sizes = {name: len(content) for name, content in self.repositories[model].items()} | self.announced
        siblings = [{"rfilename": name, "size": sizes[name]} for name in self.repositories[model]]
        body = json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode()
        return self._send_body(request, 200, body, {"Content-Type": "application/json"})

    def _tree(self, request, model):
        files = self.repositories[model].items()
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _etag(content)} for name, content in files
        ]
        return _send(request, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _file(self, request, content):
        asked = _RANGE.fullmatch(request.headers.get("Range", "")) if self.ranges else None
        status, headers, body = 200, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}, content
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            status, body = 206, content[first : last + 1]
            headers |= {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return self._send_body(request, status, body, headers)

    def _send_body(self, request, status, body, headers):
        if request.command == "HEAD":
            return _head(request, status, len(body), headers)
        if status == 200 and not self.lengths:
            headers = headers | {"Content-Length": None, "Connection": "close"}
        if not request.path.startswith(tuple(self.trickle)):
            return _send(request, status, body, headers)
        _head(request, status, len(body), headers)
        with contextlib.suppress(OSError):
            for index in range(len(body)):
                request.wfile.write(body[index : index + 1])
                request.wfile.flush()
                if self.stopped.wait(0.05):
                    break
        request.close_connection = True
        return None


def _etag(content):
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _send(request, status, body, headers):
    # A client that has read enough closes the connection.
    with contextlib.suppress(OSError):
        _head(request, status, len(body), headers)
        if request.command != "HEAD":
            request.wfile.write(body)


def _head(request, status, length, headers):
    request.send_response(status)
    for name, value in ({"Content-Length": str(length)} | headers).items():
        if value is not None:
            request.send_header(name, value)
    request.end_headers()
