"""`python -m benchmarks.attacks`: attacks on a running service, while `/healthz` is asked all the time.

Every request and file with which an attack on the service once got through is sent again, to `rocket serve` and to API
and worker on Postgres. One line per attack says what came of it and the longest that `/healthz` took meanwhile; an
attack that gets through makes the exit code 1. A process apart asks `/healthz`, so that the attacker's own work is not
counted; its figures at rest come first, as attacker and service share this machine.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from tests.e2e.deployment import Deployment
from tests.e2e.service_process import ROCKET, Service
from tests.reference.safetensors_files import save_llama
from tests.reference.tiny_models import save_tiny_model
from tests.servers import Postgres, Redis

BAR_MILLISECONDS = 200.0
REQUEST = {"ratio": 0.3, "calibration": {"samples": 2, "sequence_length": 16}}
# Of each thing once more, as an attacker would send it.
AT_ONCE = 4
_PROBE = """
import sys, time, urllib.request
while True:
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(sys.argv[1] + "/healthz", timeout=30) as answer:
            answer.read()
    except OSError as error:
        print(error, file=sys.stderr)
    print(f"{time.time()} {1000 * (time.perf_counter() - began)}", flush=True)
    time.sleep(0.02)
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A service under attack.

    Attributes:
        url: where it is.
        models: its models folder.
        keys: an API key for each of two tenants, the attacker's first.
        service: the processes.
    """

    url: str
    models: Path
    keys: tuple[str, str]
    service: Service

    def client(self, tenant: int = 0, **options: object) -> httpx2.Client:
        """A client with the key of a tenant."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def connect(self) -> socket.socket:
        """A connection without a word."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=30)

    def head(self, method: str, path: str, *lines: str, tenant: int = 0) -> bytes:
        """A request head."""
        host = urlsplit(self.url).netloc
        first = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {self.keys[tenant]}"]
        return "\r\n".join([*first, *lines, "", ""]).encode()


def estimate(target: Target, name: str, **more: object) -> Counter[int]:
    """Statuses of some estimates of a local model, asked for at once."""
    body = REQUEST | {"model_id": f"local/{name}"} | more

    def ask(_: int) -> int:
        with target.client() as client:
            return client.post("/estimates", json=body).status_code

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(ask, range(AT_ONCE)))


def require(statuses: Counter[int], *expected: int) -> str:
    """What was answered, if nothing else was."""
    assert set(statuses) <= set(expected), dict(statuses)
    return f"answered with {', '.join(map(str, sorted(statuses)))}"


def form_with_a_slow_charset(target: Target) -> str:
    """A sign-in form in punycode, whose decoding is quadratic."""
    body = b'--xx\r\nContent-Disposition: form-data; name="key"\r\n\r\n' + b"a" * 900_000 + b"\r\n--xx--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=xx; charset=punycode"}

    def send(_: int) -> int:
        try:
            return httpx2.post(f"{target.url}/ui/sign-in", content=body, headers=headers, timeout=60).status_code
        except httpx2.WriteError:
            # Refused before all of it was sent.
            return 413

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return require(Counter(pool.map(send, range(AT_ONCE))), 413, 415, 429)


def header_of_many_dimensions(target: Target) -> str:
    """An empty tensor of a hundred thousand dimensions."""
    shape = {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 0]}
    return _hostile_header(target, "dimensions", {"model.layers.0.a.weight": shape})


def tensor_without_elements(target: Target) -> str:
    """A matrix of no rows and no columns."""
    shape = {"dtype": "F32", "shape": [0, 0], "data_offsets": [0, 0]}
    return _hostile_header(target, "empty", {"model.layers.0.a.weight": shape})


def unknown_dtype(target: Target) -> str:
    """A dtype that no library has heard of."""
    shape = {"dtype": "F99", "shape": [4, 4], "data_offsets": [0, 0]}
    return _hostile_header(target, "dtype", {"model.layers.0.a.weight": shape})


def header_of_many_tensors(target: Target) -> str:
    """As many tensors as a header may have, each of another shape."""
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
    """A config.json that would be built before it is doubted."""
    folder = save_tiny_model("llama", target.models / "layers")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    return require(estimate(target, "layers"), 422)


def deep_config(target: Target) -> str:
    """Four megabytes of brackets."""
    folder = save_llama(target.models / "deep")
    (folder / "config.json").write_bytes(b'{"model_type": ' + b"[" * 4_000_000)
    return require(estimate(target, "deep"), 422)


def long_ignore_pattern(target: Target) -> str:
    """A pattern whose nearest match takes long to find."""
    return require(estimate(target, "good", options={"ignore": ["x" * 100_000]}), 422)


def keys_twice(target: Target) -> str:
    """A body that two readers would understand differently."""
    with target.client() as client:
        body = b'{"model_id": "local/good", "ratio": 0.3, "ratio": 0.9}'
        answer = client.post("/estimates", content=body, headers={"Content-Type": "application/json"})
    return require(Counter([answer.status_code]), 400, 422)


def links_out_of_the_folder(target: Target) -> str:
    """Files of a model that are links to the environment of whoever copies them, and to the service's own key."""
    folder = save_tiny_model("llama", target.models / "links")
    (folder / "LICENSE").symlink_to("/proc/self/environ")
    (folder / "NOTICE.txt").symlink_to(target.service.data_dir / "secret.key")
    return require(estimate(target, "links"), 422)


def tokenizer_that_multiplies(target: Target) -> str:
    """A tokenizer that makes a million of every letter."""
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
    """Uploads that send one byte, more of them than there are threads; another tenant uploads meanwhile."""
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
    """Requests that wait, more than there are places; another tenant follows its job meanwhile."""
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
    """Three thousand connections that send half a request head."""
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
        # An answer may come before the end.
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def guesses_from_many_addresses(target: Target) -> str:
    """Guessed keys, each under another forwarded address."""
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
    # Last: from here on this address has to wait.
    guesses_from_many_addresses,
)


class Probe:
    """Asks `/healthz` without a pause, in a process apart.

    Args:
        url: of the service.
    """

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _PROBE, url], stdout=subprocess.PIPE, text=True)  # noqa: S603
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def longest(self, since: float) -> float:
        """Milliseconds of the slowest answer since a time."""
        return max((took for at, took in self._seen if at >= since), default=float("inf"))

    def close(self) -> None:
        """Stops asking."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                at, took = line.split()
                self._seen.append((float(at), float(took)))


def attack(target: Target, attacks: tuple[Callable[[Target], str], ...]) -> bool:
    """Runs attacks one after another; returns whether all were warded off."""
    probe = Probe(target.url)
    is_safe = True
    try:
        began = time.time()
        time.sleep(5)
        print(f"  {'at rest':<32} {probe.longest(began):6.0f} ms")
        for one in attacks:
            began = time.time()
            try:
                outcome, held = one(target), True
            except (AssertionError, httpx2.HTTPError) as error:
                outcome, held = f"GOT THROUGH: {type(error).__name__} {error}", False
            time.sleep(0.2)
            longest = probe.longest(began)
            mark = "" if longest <= BAR_MILLISECONDS else f"  above {BAR_MILLISECONDS:.0f} ms"
            is_safe = is_safe and held and not mark
            print(f"  {one.__name__.replace('_', ' '):<32} {longest:6.0f} ms  {outcome}{mark}", flush=True)
    finally:
        probe.close()
    return is_safe


@contextmanager
def _targets(folder: Path, kinds: list[str]) -> Iterator[Iterator[tuple[str, Target]]]:
    def each() -> Iterator[tuple[str, Target]]:
        if "embedded" in kinds:
            yield "rocket serve", _started(folder / "embedded", {})
        if "postgres" in kinds:
            with ExitStack() as servers:
                postgres, redis_server = Postgres(), Redis()
                servers.callback(postgres.close)
                servers.callback(redis_server.close)
                postgres.start()
                redis_server.start()
                url = postgres.url(postgres.create(postgres.migrated))
                yield (
                    "rocket api and rocket worker on Postgres",
                    _started(
                        folder / "postgres",
                        {"ROCKET_DATABASE_URL": url, "ROCKET_BROKER_URL": redis_server.url},
                        Deployment,
                    ),
                )

    yield each()


def _started(folder: Path, settings: dict[str, str], kind: type[Service] = Service) -> Target:
    data_dir = folder / "data"
    save_tiny_model("llama", data_dir / "models" / "good")
    service = kind(data_dir, ROCKET_SUBMIT_RATE_LIMIT="100000/minute", **settings)
    environment = service.environment | {"ROCKET_DATA_DIR": str(data_dir)}
    keys = [
        subprocess.run(  # noqa: S603
            [ROCKET, "admin", "keys", "create", tenant], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        for tenant in ("attacker", "other")
    ]
    return Target(url=service.url, models=data_dir / "models", keys=(keys[0], keys[1]), service=service)


def main() -> None:
    """Attacks both kinds of service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[one.__name__ for one in ATTACKS], help="one attack")
    parser.add_argument("--servers", choices=["embedded", "postgres"], help="one kind of service")
    given = parser.parse_args()
    attacks = tuple(one for one in ATTACKS if given.only in {None, one.__name__})
    # For three thousand connections.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="rocket-attacks-"))
    is_safe = True
    try:
        with _targets(folder, [given.servers] if given.servers else ["embedded", "postgres"]) as targets:
            for name, target in targets:
                print(name)
                try:
                    is_safe = attack(target, attacks) and is_safe
                finally:
                    target.service.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if is_safe else 1)


if __name__ == "__main__":
    main()
