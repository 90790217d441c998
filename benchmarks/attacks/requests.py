"""Requests that were taken for others than they are, and keys that outlive the one they were made with."""

import re
import subprocess
from collections.abc import Callable

import httpx2

from benchmarks.attacks.target import Target
from tests.e2e.service_process import ROCKET


def two_lengths_of_a_body(target: Target) -> str:
    """Send a body with a length and in chunks, after whose end a proxy would see another request."""
    lines = ("Content-Type: application/json", "Content-Length: 5", "Transfer-Encoding: chunked")
    with target.connect() as connection:
        connection.sendall(target.head("POST", "/jobs", *lines) + b"0\r\n\r\n" + target.head("GET", "/jobs"))
        answers = b""
        while part := connection.recv(65536):
            answers += part
    assert answers.count(b"HTTP/1.1 ") == 1, answers
    return "answered once, and the connection was closed"


def numbers_that_are_none(target: Target) -> str:
    """Announce files whose sizes are strings, Boolean values, and too large in total for the database."""
    statuses = set()
    with target.client() as client:
        for sizes in (["1"], [True], [2**62, 2**62]):
            files = [{"path": f"model-{number}.safetensors", "size": size} for number, size in enumerate(sizes)]
            body = {"name": "numbers", "files": [{"path": "config.json", "size": 2}, *files]}
            statuses.add(client.post("/models", json=body).status_code)
    assert statuses == {422}, statuses
    return "answered with 422"


def key_from_a_stolen_key(target: Target) -> str:
    """Make a key with a stolen one, by its form without a session and signed in, and use it after the revocation."""
    stolen = _admin(target, "create", "attacker").split()[-1]
    with httpx2.Client(base_url=target.url, timeout=60) as browser:
        direct = browser.post("/ui/keys", headers=_bearer(stolen), data={"scope-read": "yes"})
        assert direct.status_code == 403, direct.status_code
        browser.post("/ui/sign-in", data={"key": stolen})
        token = re.search(r'name="csrf" value="(\w+)"', browser.get("/ui/keys").text)
        assert token, "no form"
        page = browser.post("/ui/keys", data={"csrf": token[1], "scope-read": "yes"}).text
    made = re.search(r"rk_[0-9a-f]{16}_[0-9a-f]{64}", page)
    assert made, page
    _admin(target, "revoke", stolen.split("_")[1])
    status = httpx2.get(f"{target.url}/jobs", headers=_bearer(made[0])).status_code
    assert status == 401, f"the key made with a revoked one is answered with {status}"
    return "refused without a session, and with the revoked key"


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _admin(target: Target, *words: str) -> str:
    environment = target.service.environment | {"ROCKET_DATA_DIR": str(target.service.data_dir)}
    command = [ROCKET, "admin", "keys", *words]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout  # noqa: S603


ATTACKS: tuple[Callable[[Target], str], ...] = (two_lengths_of_a_body, numbers_that_are_none, key_from_a_stolen_key)
