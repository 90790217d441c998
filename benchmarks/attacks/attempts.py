"""Requests and files with which attacks on the service once succeeded."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2

from benchmarks.attacks import confined_programs, deliveries, requests
from benchmarks.attacks.hostile_models import HOSTILE_MODELS
from benchmarks.attacks.target import REQUEST, Target
from tests.reference.safetensors_files import save_llama
from tests.reference.tiny_models import save_tiny_model

# Number of concurrent requests of each kind.
AT_ONCE = 4


def estimate(target: Target, name: str, **more: object) -> Counter[int]:
    """Request estimates of a local model concurrently, and return the counts of their statuses."""
    body = REQUEST | {"model_id": f"local/{name}"} | more

    def ask(_: int) -> int:
        with target.client() as client:
            return client.post("/estimates", json=body).status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(ask, range(AT_ONCE)))


def require(statuses: Counter[int], *expected: int) -> str:
    """Return a text with the statuses, which must all be expected ones."""
    assert set(statuses) <= set(expected), dict(statuses)
    return f"answered with {', '.join(map(str, sorted(statuses)))}"


def form_with_a_slow_charset(target: Target) -> str:
    """Send a sign-in form in punycode, whose decoding takes quadratic time."""
    body = b'--xx\r\nContent-Disposition: form-data; name="key"\r\n\r\n' + b"a" * 900_000 + b"\r\n--xx--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=xx; charset=punycode"}

    def send(_: int) -> int:
        try:
            return httpx2.post(f"{target.url}/ui/sign-in", content=body, headers=headers, timeout=60).status_code
        except httpx2.WriteError:
            # Refused before the whole body was sent.
            return 413

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return require(Counter(pool.map(send, range(AT_ONCE))), 413, 415, 429)


def header_of_many_dimensions(target: Target) -> str:
    """Store an empty tensor of a hundred thousand dimensions."""
    shape = {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 0]}
    return _hostile_header(target, "dimensions", {"model.layers.0.a.weight": shape})


def tensor_without_elements(target: Target) -> str:
    """Store a matrix without rows and columns."""
    shape = {"dtype": "F32", "shape": [0, 0], "data_offsets": [0, 0]}
    return _hostile_header(target, "empty", {"model.layers.0.a.weight": shape})


def unknown_dtype(target: Target) -> str:
    """Store a tensor with an unknown dtype."""
    shape = {"dtype": "F99", "shape": [4, 4], "data_offsets": [0, 0]}
    return _hostile_header(target, "dtype", {"model.layers.0.a.weight": shape})


def header_of_many_tensors(target: Target) -> str:
    """Store as many tensors as a header may have, each with a different shape."""
    tensors = {
        f"model.layers.{i}.w.weight": {"dtype": "F32", "shape": [0, i], "data_offsets": [0, 0]} for i in range(240_000)
    }
    return _hostile_header(target, "tensors", tensors)


def _hostile_header(target: Target, name: str, header: dict[str, object]) -> str:
    folder = save_llama(target.models / name)
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    return require(estimate(target, name), 422, 429, 503)


def a_billion_layers(target: Target) -> str:
    """Store a config.json with a billion layers, which must not be built before they are checked."""
    folder = save_tiny_model("llama", target.models / "layers")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    return require(estimate(target, "layers"), 422)


def deep_config(target: Target) -> str:
    """Store a config.json with four megabytes of brackets."""
    folder = save_llama(target.models / "deep")
    (folder / "config.json").write_bytes(b'{"model_type": ' + b"[" * 4_000_000)
    return require(estimate(target, "deep"), 422)


def long_ignore_pattern(target: Target) -> str:
    """Send a pattern whose nearest match takes long to find."""
    return require(estimate(target, "good", options={"ignore": ["x" * 100_000]}), 422)


def keys_twice(target: Target) -> str:
    """Send a body with a duplicate key, which parsers understand differently."""
    with target.client() as client:
        body = b'{"model_id": "local/good", "ratio": 0.3, "ratio": 0.9}'
        answer = client.post("/estimates", content=body, headers={"Content-Type": "application/json"})
    return require(Counter([answer.status_code]), 400, 422)


def links_out_of_the_folder(target: Target) -> str:
    """Store files of a model that link to the environment of the process that copies them, and to the service's key."""
    folder = save_tiny_model("llama", target.models / "links")
    (folder / "LICENSE").symlink_to("/proc/self/environ")
    (folder / "NOTICE.txt").symlink_to(target.service.data_dir / "secret.key")
    return require(estimate(target, "links"), 422)


def tokenizer_that_multiplies(target: Target) -> str:
    """Submit a model whose tokenizer makes a million letters of every letter."""
    folder = save_tiny_model("llama", target.models / "multiplies")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "."}, "content": "e" * 1000}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 4}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with target.client() as client:
        job = client.post("/jobs", json=REQUEST | {"model_id": "local/multiplies"}).raise_for_status().json()
        while job["status"] not in {"succeeded", "failed", "cancelled"}:
            time.sleep(0.5)
            job = client.get(f"/jobs/{job['id']}").raise_for_status().json()
    assert job["status"] == "failed", job
    assert job["attempt"] == 1, job
    return f"failed with {job['error']['code']} in one attempt"


def slow_uploads(target: Target) -> str:
    """Start more uploads than there are threads, each sending only one byte; another tenant uploads meanwhile."""
    lines = ("Content-Type: text/plain", "Content-Length: 1000")
    with ExitStack() as open_ones:
        for _ in range(16):
            connection = open_ones.enter_context(target.connect())
            connection.sendall(target.head("POST", "/calibrations", *lines) + b"a")
        with target.client(1) as other:
            began = time.monotonic()
            headers = {"Content-Type": "text/plain"}
            answer = other.post("/calibrations", content=f"a text of {began}".encode(), headers=headers)
    assert answer.status_code == 201, answer.text
    return f"another tenant's upload took {time.monotonic() - began:.2f} s"


def many_waits(target: Target) -> str:
    """Send more waiting requests than there are slots; another tenant follows its job meanwhile."""
    with target.client() as client, target.client(1) as other:
        own = client.post("/jobs", json=REQUEST | {"model_id": "local/good"}).raise_for_status().json()["id"]
        theirs = other.post("/jobs", json=REQUEST | {"model_id": "local/good"}).raise_for_status().json()["id"]
        with ExitStack() as open_ones:
            for _ in range(80):
                connection = open_ones.enter_context(target.connect())
                connection.sendall(target.head("GET", f"/jobs/{own}", "Prefer: wait=60"))
            time.sleep(1)
            with other.stream("GET", f"/jobs/{theirs}/events", headers={"Accept": "text/event-stream"}) as stream:
                assert stream.status_code == 200, stream.status_code
        for client_, job_id in ((client, own), (other, theirs)):
            client_.post(f"/jobs/{job_id}/cancel")
    return "another tenant's events were streamed"


def half_heads(target: Target) -> str:
    """Open three thousand connections that send half a request head."""
    with ExitStack() as open_ones:
        connections = []
        for _ in range(3000):
            try:
                connection = open_ones.enter_context(target.connect())
                connection.sendall(b"GET /jobs HTTP/1.1\r\nHost: ")
            except OSError:
                continue
            connections.append(connection)
        time.sleep(15)
        left = sum(_is_open(connection) for connection in connections)
    assert left == 0, f"{left} are still open"
    return f"of {len(connections)} accepted none is open after 15 s"


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        # A response may arrive before the end.
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def guesses_from_many_addresses(target: Target) -> str:
    """Send guessed keys, each with a different forwarded address."""
    statuses: Counter[int] = Counter()
    with httpx2.Client(base_url=target.url) as client:
        for number in range(60):
            headers = {"X-Forwarded-For": f"10.0.0.{number}", "Authorization": "Bearer rk_guess"}
            statuses[client.get("/jobs", headers=headers).status_code] += 1
    assert statuses[429] > 0, dict(statuses)
    return f"{statuses[429]} of 60 were refused as too many"


ATTACKS: tuple[Callable[[Target], str], ...] = (
    form_with_a_slow_charset,
    header_of_many_dimensions,
    header_of_many_tensors,
    tensor_without_elements,
    unknown_dtype,
    a_billion_layers,
    deep_config,
    long_ignore_pattern,
    keys_twice,
    links_out_of_the_folder,
    tokenizer_that_multiplies,
    slow_uploads,
    many_waits,
    half_heads,
    *HOSTILE_MODELS,
    *deliveries.ATTACKS,
    *requests.ATTACKS,
    *confined_programs.ATTACKS,
    # Last: from here on this address is rate limited.
    guesses_from_many_addresses,
)
