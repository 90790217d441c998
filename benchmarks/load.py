"""Load test with many small jobs, two API processes, two workers, and frequent kills: `python -m benchmarks.load`.

It uses Postgres and Redis if the tests' servers are installed, otherwise SQLite and polling. Meanwhile `GET /jobs/{id}`
is requested at a steady rate, regardless of whether earlier answers have arrived, so that a stall counts against every
request that it delays. With `--calm` nothing is killed, and with `--embedded` the same jobs are sent to one
`rocket serve`. Standard output ends with a JSON summary; if a promise was broken, the exit code is 1.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil

from tests.e2e.service_process import runs_job
from tests.reference.tiny_models import save_tiny_model

ROCKET = Path(sys.executable).parent / "rocket"
TERMINAL = {"succeeded", "failed", "cancelled"}
MAX_ATTEMPTS = 25
# Two layers of a tiny model, so that most of the time is the start of a job's process.
REQUEST = {
    "model_id": "local/tiny",
    "ratio": 0.3,
    "calibration": {"samples": 2, "sequence_length": 16},
    "options": {"ignore": ["*.mlp.*", "*.k_proj", "*.v_proj", "*.o_proj"]},
}
LAYERS = 2
READERS = 32
WORKERS = 2
FIRST_SECONDS = 300.0
# Readers, servers and both workers may share two cores, and work lost by a kill is repeated: only jobs that take longer
# than this multiple of the time of a single job count as lost.
SLOWNESS = 6
KILLS_APART = 2
SETTINGS = {
    "ROCKET_MAX_ATTEMPTS": str(MAX_ATTEMPTS),
    "ROCKET_LEASE_SECONDS": "8",
    "ROCKET_POLL_SECONDS": "0.5",
    "ROCKET_RETRY_BACKOFF_SECONDS": "0.1",
    "ROCKET_MAX_ACTIVE_JOBS": "100000",
    "ROCKET_RATE_LIMIT": "1000000/second",
    "ROCKET_SUBMIT_RATE_LIMIT": "1000000/second",
    "ROCKET_LOG_LEVEL": "warning",
    "OMP_NUM_THREADS": "1",
}


class Stack:
    """Processes of a service: two for the API, and two workers.

    Args:
        folder: folder for everything that they write.
        settings: environment variables with the addresses of database and broker.
        embedded: start a single `rocket serve` instead.
    """

    def __init__(self, folder: Path, settings: dict[str, str], *, embedded: bool = False) -> None:
        self._log = folder / "log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCKET_", "HF_TOKEN"))}
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = kept | SETTINGS | settings | {"ROCKET_DATA_DIR": str(folder / "data")}
        subprocess.run([ROCKET, "migrate"], env=self._environment, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        lines = [self._start("serve" if embedded else "api", "--port", "0")[1] for _ in range(1 if embedded else 2)]
        self.urls = [line.removeprefix("Serving on ").strip() for line in lines]
        self.workers = [self._start("worker", "--queue", "cpu")[0] for _ in range(0 if embedded else WORKERS)]
        self._jobs: list[psutil.Process] = []

    def kill(self, chance: random.Random) -> list[str]:
        """Kill a job's process or a worker, and return which; nothing if it was to be a job and none is running."""
        if chance.random() < 0.5:
            return ["job"] * self._kill_job(chance)
        self._kill_worker(chance)
        return ["worker"]

    def _kill_job(self, chance: random.Random) -> bool:
        running = [child for worker in self.workers for child in self._descendants(worker) if runs_job(child)]
        if running:
            with suppress(psutil.NoSuchProcess):
                chance.choice(running).kill()
        return bool(running)

    def _kill_worker(self, chance: random.Random) -> None:
        """Kill a worker and start another; its job's process must exit by itself."""
        number = chance.randrange(len(self.workers))
        self._jobs += self._descendants(self.workers[number])
        self.workers[number].kill()
        self._end(self.workers[number])
        self.workers[number] = self._start("worker", "--queue", "cpu")[0]

    def close(self) -> list[str]:
        """Stop all processes in order, and return what went wrong."""
        wrong = []
        for worker in self.workers:
            self._jobs += self._descendants(worker)
        # Including one that was just being started.
        running = [process for process in self._started if process.returncode is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            if (code := self._end(process)) != 0:
                wrong.append(f"a process ended with {code} when it was told to stop")
        _, alive = psutil.wait_procs(self._jobs, timeout=10)
        wrong += [f"a job's process has outlived its worker: {process.pid}" for process in alive]
        return wrong

    def log(self) -> str:
        """Return the end of their log."""
        return self._log.read_text()[-5000:]

    def _descendants(self, worker: "subprocess.Popen[bytes]") -> list[psutil.Process]:
        try:
            return psutil.Process(worker.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _start(self, *command: str) -> tuple["subprocess.Popen[bytes]", str]:
        with self._log.open("ab") as log:
            process = subprocess.Popen([ROCKET, *command], stdout=subprocess.PIPE, stderr=log, env=self._environment)  # noqa: S603
        self._started.append(process)
        assert process.stdout is not None
        # This returns when the process exits, too, so that a process that does not start cannot block.
        line = process.stdout.readline().decode()
        assert line, self.log()
        return process, line

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> int:
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        return code


class Readers:
    """Clients that request jobs at a steady rate, and check that final statuses do not change.

    Args:
        urls: addresses of the API processes.
        job_ids: the jobs.
        rate: requests per second.
    """

    def __init__(self, urls: list[str], job_ids: list[str], rate: float) -> None:
        self._clients = [httpx2.Client(base_url=url, timeout=30, limits=_no_limits()) for url in urls]
        self._job_ids, self._rate = job_ids, rate
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask_on_time)
        self.milliseconds: list[float] = []
        self.unsent: list[float] = []
        self.wrong: list[str] = []
        self.endings: dict[str, str] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Send requests while the context lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()
            for client in self._clients:
                client.close()

    def _ask_on_time(self) -> None:
        began = time.monotonic()
        with ThreadPoolExecutor(READERS) as pool:
            for number in itertools.count():
                due = began + number / self._rate
                if self._done.wait(max(0.0, due - time.monotonic())):
                    return
                job_id = self._job_ids[number % len(self._job_ids)]
                pool.submit(self._ask, self._clients[number % len(self._clients)], job_id, due)

    def _ask(self, client: httpx2.Client, job_id: str, due: float) -> None:
        if self._done.is_set():
            # It was due but could not be sent in time: it has waited at least this long.
            self.unsent.append(1000 * (time.monotonic() - due))
            return
        try:
            answer = client.get(f"/jobs/{job_id}")
        except httpx2.HTTPError as error:
            self.wrong.append(f"GET /jobs/ID: {type(error).__name__}")
            return
        # Measured from when it was due, to include the wait for a free client.
        self.milliseconds.append(1000 * (time.monotonic() - due))
        if answer.status_code != httpx2.codes.OK:
            self.wrong.append(f"GET /jobs/ID: {answer.status_code}")
            return
        status = answer.json()["status"]
        if status in TERMINAL and self.endings.setdefault(job_id, status) != status:
            self.wrong.append(f"{job_id} was {self.endings[job_id]} and is {status}")


def main() -> int:
    """Run the load test and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seconds-between-kills", type=float, help="on average; default twice as long as a job takes")
    parser.add_argument("--calm", action="store_true", help="kill nothing")
    parser.add_argument("--embedded", action="store_true", help="one `rocket serve` on SQLite; nothing is killed")
    parser.add_argument("--rate", type=float, default=50, help="of GET /jobs/{id}, per second")
    parser.add_argument("--minutes", type=float, help="after which what has not ended is lost; default from one job")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    given.calm |= given.embedded
    # So that no process is left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name, servers(embedded=given.embedded) as (kind, settings):
        folder = Path(name)
        save_tiny_model("llama", folder / "data" / "models" / "tiny")
        stack = Stack(folder, settings, embedded=given.embedded)
        try:
            summary = run(stack, given)
        except BaseException:
            print(stack.log(), file=sys.stderr)
            raise
        finally:
            wrong = stack.close()
        summary["broken"] += wrong
        if summary["broken"]:
            print(stack.log(), file=sys.stderr)
    print(json.dumps({"seed": given.seed, "servers": kind, **summary}, indent=2))
    return 1 if summary["broken"] else 0


@contextmanager
def servers(*, embedded: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the kind and the settings of a new Postgres and Redis, or of SQLite if asked, or they are not installed."""
    from tests.servers import MissingServerError, Postgres, Redis

    if embedded:
        yield "sqlite", {}
        return
    with ExitStack() as running:
        try:
            postgres = Postgres()
            running.callback(postgres.close)
            redis = Redis()
            running.callback(redis.close)
        except MissingServerError as error:
            print(f"{error}; on with SQLite", file=sys.stderr)
            yield "sqlite", {}
            return
        yield (
            "postgres, redis",
            {"ROCKET_DATABASE_URL": postgres.url(postgres.create()), "ROCKET_BROKER_URL": redis.url},
        )


def run(stack: Stack, given: argparse.Namespace) -> dict:
    """Submit, kill, wait and judge."""
    chance = random.Random(given.seed)  # noqa: S311  # moments, no secrets
    began = time.monotonic()
    clients = [httpx2.Client(base_url=url, timeout=60) for url in stack.urls]
    # The first job is not interrupted: it gives the expected result and the time of a job.
    first = submit(clients, -1)
    while look(clients[0], first)["status"] not in TERMINAL:
        assert time.monotonic() < began + FIRST_SECONDS, "the first job has not ended"
        time.sleep(0.2)
    alone = time.monotonic() - began
    pause = given.seconds_between_kills or KILLS_APART * alone
    began = time.monotonic()
    deadline = began + (60 * given.minutes if given.minutes else SLOWNESS * alone * (1 + given.jobs / WORKERS))
    with ThreadPoolExecutor(4) as pool:
        job_ids = list(pool.map(lambda number: submit(clients, number), range(given.jobs)))
    readers, kills = Readers(stack.urls, job_ids, given.rate), Counter[str]()
    waiting, interrupted = set(job_ids), []
    with readers.reading(), suppressed_interrupt(interrupted):
        while waiting and time.monotonic() < deadline:
            time.sleep(chance.uniform(0.5, 1.5) * pause)
            if not given.calm:
                kills.update(stack.kill(chance))
            waiting -= {job_id for job_id in waiting if look(clients[0], job_id)["status"] in TERMINAL}
            print(f"{len(waiting)} of {given.jobs} jobs are left, {sum(kills.values())} kills", file=sys.stderr)
    seconds = time.monotonic() - began
    # Jobs that had not ended at an interrupt are not lost, but prove nothing either.
    judged = [judge(clients[-1], job_id) for job_id in job_ids if not (interrupted and job_id in waiting)]
    attempts = [job["attempt"] for job in judged]
    expected = judge(clients[-1], first)["files"]
    broken = sorted({*readers.wrong, *(wrong for job in judged for wrong in job["wrong"])})
    broken += [f"{job['id']}: its files are others than without a kill" for job in judged if job["files"] != expected]
    broken += [f"interrupted with {len(waiting)} jobs left" for _ in interrupted]
    for client in clients:
        client.close()
    return {
        "jobs": given.jobs,
        "succeeded": sum(job["status"] == "succeeded" for job in judged),
        "lost": 0 if interrupted else len(waiting),
        "duplicates": sum(job["duplicates"] for job in judged),
        "attempts": {"mean": statistics.mean(attempts), "most": max(attempts), "allowed": MAX_ATTEMPTS},
        "kills": {} if given.calm else dict(kills) | {"seconds_between": round(pause, 1)},
        "seconds_alone": round(alone, 1),
        "seconds": round(seconds, 1),
        "jobs_per_minute": round(60 * (given.jobs - len(waiting)) / seconds, 2),
        "reads": quantiles(readers.milliseconds + readers.unsent)
        | {"failed": len(readers.wrong), "unsent": len(readers.unsent)},
        "broken": broken,
    }


@contextmanager
def suppressed_interrupt(seen: list[KeyboardInterrupt]) -> Iterator[None]:
    """End the block early when the run is interrupted, so that the results so far are reported."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        seen.append(interrupt)


def submit(clients: list[httpx2.Client], number: int) -> str:
    """Submit a job to every API process, with the same idempotency key."""
    answers = [client.post("/jobs", json=REQUEST, headers={"Idempotency-Key": f"job {number}"}) for client in clients]
    assert [answer.status_code for answer in answers] == [202, 200][: len(answers)], answers[0].text
    [job_id] = {answer.json()["id"] for answer in answers}
    return str(job_id)


def look(client: httpx2.Client, job_id: str, part: str = "") -> dict:
    """Return a job, or a part of it."""
    answer: dict = client.get(f"/jobs/{job_id}{part}").raise_for_status().json()
    return answer


def judge(client: httpx2.Client, job_id: str) -> dict:
    """Return the outcome of a job, and the promises that it breaks."""
    job = look(client, job_id)
    events = look(client, job_id, "/events?limit=1000")["data"]
    artifacts = look(client, job_id, "/artifacts")["data"]
    told = Counter((event["type"], event["data"].get("layer"), event["data"].get("status")) for event in events)
    once = {what: count for what, count in told.items() if what[0] in {"layer", "allocation"} or what[2] in TERMINAL}
    duplicates = sum(count - 1 for count in once.values())
    promises = {
        f"it is {job['status']}": job["status"] == "succeeded",
        f"attempt {job['attempt']}": 1 <= job["attempt"] <= MAX_ATTEMPTS,
        f"it started {told['status', None, 'running']} times": told["status", None, "running"] <= MAX_ATTEMPTS,
        "something was published twice": not duplicates,
        "events are not numbered 1, 2, 3 ...": [event["id"] for event in events] == [*range(1, len(events) + 1)],
        "layers are missing": len(look(client, job_id, "/layers")["data"]) == LAYERS,
    }
    # Report and model card contain times.
    told = ("report.json", "report.html", ".md")
    files = {file["name"]: file["sha256"] for file in artifacts if not file["name"].endswith(told)}
    return {
        "id": job_id,
        "status": job["status"],
        "attempt": job["attempt"],
        "duplicates": duplicates,
        "files": files,
        "wrong": [f"{job_id}: {broken}" for broken, holds in promises.items() if not holds],
    }


def quantiles(milliseconds: list[float]) -> dict[str, float]:
    """Return quantiles of the response times."""
    ordered = sorted(milliseconds)
    places = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    found = {name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1) for name, part in places.items()}
    return {"count": len(ordered), **found}


def _no_limits() -> httpx2.Limits:
    return httpx2.Limits(max_connections=None, max_keepalive_connections=READERS)


if __name__ == "__main__":
    sys.exit(main())
