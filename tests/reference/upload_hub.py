"""A model hub on the loopback interface that accepts uploads of a folder by its client."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants

TOKEN = "hf_writer0123456789"  # noqa: S105 - no real one
OWNER = "alice"
# Larger files are stored separately from the commits that name them.
LARGE_BYTES = 1000


class UploadHub:
    """Repositories by id; each has branches, which have commits, which are the content of files by name.

    Attributes:
        repositories: the branches of each repository, each with its commits, oldest first.
        private: ids of those that only their owner may read.
        objects: large files by their SHA-256.
        received: SHA-256 of each large file, each time that it was sent.
        messages: of all commits.
        refusals: method and beginning of a path, with status and message that it is answered with.
        asked: method and path of each request.
        held: paths that are held back.
    """

    def __init__(self):
        self.repositories, self.private, self.objects = {}, set(), {}
        self.received, self.messages, self.asked = [], [], []
        self.refusals = {}
        self.held, self._holding, self._end = [], None, threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self):
                hub._answer(self)

            do_GET = do_POST = do_PUT = _answer

            def log_message(self, *_arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def replace_the_hub(self, monkeypatch):
        """Make the Hub's client in this process use this server, without the store that only the real Hub has."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)

    def hold(self, start):
        """Make requests to paths with this start wait, and then fail."""
        self._holding = start

    def let_go(self):
        """End the waiting, for current and future requests."""
        self._holding = None
        self._end.set()

    def files(self, repository, branch="main"):
        """Return the files of a branch."""
        return self.repositories[repository][branch][-1]

    def commits(self, repository, branch="main"):
        """Return the number of a branch's commits without the first, which is empty."""
        return len(self.repositories[repository][branch]) - 1

    def _answer(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        path = request.path.partition("?")[0]
        self.asked.append((request.command, path))
        if self._holding is not None and path.startswith(self._holding):
            self.held.append(path)
            self._end.wait(30)
            request.close_connection = True
            return None
        for (method, start), (status, message) in self.refusals.items():
            if method == request.command and path.startswith(start):
                return _send(request, status, {"error": message})
        stored = re.fullmatch(r"/objects/(\w{64})", path)
        if stored:
            assert hashlib.sha256(body).hexdigest() == stored[1]
            self.objects[stored[1]] = body
            self.received.append(stored[1])
            return _send(request, 200, {})
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _send(request, 401, {"error": "Invalid credentials in Authorization header"})
        return self._known(request, path, json_or_lines(body))

    def _known(self, request, path, body):
        if path == "/api/repos/create":
            return self._create(request, body)
        if path == "/api/validate-yaml":
            return _send(request, 200, {"errors": [], "warnings": [{"message": "empty metadata"}]})
        of_model = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/(.+))?", path)
        of_store = re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        repository = (of_model or of_store)[1]
        branches = self.repositories.get(repository)
        if branches is None:
            return _send(request, 404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
        if of_store:
            return _send(request, 200, {"objects": [self._stored(one) for one in body["objects"]]})
        action, branch = of_model[2] or "revision", (of_model[3] or "main").replace("%2F", "/")
        if action == "branch":
            if branch in branches:
                return _send(request, 409, {"error": "there already"})
            branches[branch] = list(branches["main"][:1])
            return _send(request, 200, {})
        if branch not in branches:
            return _send(request, 404, {"error": "none"}, {"X-Error-Code": "RevisionNotFound"})
        answer = {"revision": self._info, "preupload": self._modes, "commit": self._commit}[action]
        return _send(request, 200, answer(repository, branch, body))

    def _create(self, request, body):
        owner, name = body.get("organization") or OWNER, body["name"]
        repository = f"{owner}/{name}"
        if owner != OWNER:
            return _send(request, 403, {"error": "not yours"})
        if repository in self.repositories:
            return _send(request, 409, {"error": "there already", "url": f"{self.url}/{repository}"})
        self.repositories[repository] = {"main": [{}]}
        if body.get("visibility") == "private":
            self.private.add(repository)
        return _send(request, 200, {"url": f"{self.url}/{repository}"})

    def _info(self, repository, branch, _body):
        name = f"{branch}{self.commits(repository, branch)}"
        sha = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        return {"id": repository, "sha": sha, "private": repository in self.private, "siblings": []}

    def _modes(self, repository, branch, body):
        held = self.files(repository, branch)
        files = []
        for file in body["files"]:
            name, is_large = file["path"], file["size"] > LARGE_BYTES
            oid = {} if name not in held else {"oid": _oid(held[name], is_large)}
            mode = "lfs" if is_large else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False} | oid)
        return {"files": files}

    def _stored(self, one):
        actions = (
            {} if one["oid"] in self.objects else {"actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}}
        )
        return {"oid": one["oid"], "size": one["size"]} | actions

    def _commit(self, repository, branch, lines):
        content = dict(self.files(repository, branch))
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                content[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                content[value["path"]] = self.objects[value["oid"]]
        self.repositories[repository][branch].append(content)
        sha = self._info(repository, branch, None)["sha"]
        return {"commitUrl": f"{self.url}/{repository}/commit/{sha}", "commitOid": sha}


def json_or_lines(body):
    """Return a body of JSON, or of one JSON value per line; None if it is empty."""
    lines = [json.loads(line) for line in body.splitlines() if line.strip()]
    return lines if len(lines) > 1 else lines[0] if lines else None


def _oid(content, is_large):
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _send(request, status, answer, headers=None):
    body = json.dumps(answer).encode()
    request.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
