"""Kill matrix of `make soak`: every process is killed at every failpoint, with one job each, on both kinds of service.

`make test` kills, on Postgres and Redis, only the process that reaches a failpoint, and uses one job for all.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.e2e.deployment import Deployment
from tests.e2e.kill_matrix import (
    ATTEMPT_PROCESSES,
    MODEL,
    POINTS,
    Failpoint,
    assert_promise,
    environment,
    run_to_end,
    save_model,
    submit,
    uninterrupted,
)
from tests.e2e.service_process import Service
from tests.reference.fake_hub import FakeHub
from tests.servers import Postgres, Redis

_SECONDS = 300.0


def main() -> None:
    """Run all or the requested combinations; raises AssertionError at the first broken promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[point.name for point in POINTS], help="one place")
    parser.add_argument("--servers", choices=["embedded", "postgres"], help="one kind of service")
    given = parser.parse_args()
    kinds = [given.servers] if given.servers else ["embedded", "postgres"]
    run(kinds, [point for point in POINTS if given.only in {None, point.name}])


def run(kinds: list[str], points: list[Failpoint]) -> None:
    """Run all combinations of services and failpoints."""
    # Like the services: the results are equal byte by byte only with the same number of threads.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, FakeHub() as hub, _servers("postgres" in kinds) as servers:
        folder = Path(name)
        hub.repositories[MODEL] = save_model(folder / "model")
        expected = uninterrupted(folder / "model", folder / "uninterrupted")
        for kind in kinds:
            for point in points:
                for victim in _victims(kind, point):
                    began = time.monotonic()
                    case = folder / f"{kind}-{point.name}-{victim}"
                    attempt = _strike(case, servers if kind == "postgres" else None, point.point(victim), hub, expected)
                    seconds = time.monotonic() - began
                    print(f"{kind}: {victim} killed {point.name}: attempt {attempt}, promise kept, {seconds:.0f} s")


def _victims(kind: str, point: Failpoint) -> tuple[str, ...]:
    if point.where not in ATTEMPT_PROCESSES - {"worker"}:
        return (point.where,)
    below = dict.fromkeys((point.where, "job", "template", "worker"))
    # In the embedded service, API and worker are one process.
    return tuple(below) if kind == "embedded" else (*below, "api")


def _strike(
    case: Path, servers: tuple[Postgres, Redis] | None, point: dict, hub: FakeHub, expected: dict[str, str]
) -> int:
    """Run one job with a kill at one failpoint, and return the number of attempts."""
    data_dir, marks = case / "data", case / "marks"
    (data_dir / "models").mkdir(parents=True)
    given = environment(marks, [point], hub.url, case / "hub")
    if servers is None:
        service = Service(data_dir, **given)
    else:
        postgres, redis_server = servers
        name = postgres.create(postgres.migrated)
        urls = {"ROCKET_DATABASE_URL": postgres.url(name), "ROCKET_BROKER_URL": redis_server.url}
        service = Deployment(data_dir, **given, **urls)
    try:
        job_id = submit(service, marks)
        job = run_to_end(service, marks, job_id, seconds=_SECONDS)
        assert (marks / point["name"]).exists(), f"nobody came to {point['name']}"
        assert_promise(service, job_id, expected)
        return int(job["attempt"])
    finally:
        service.close()
        if servers is not None:
            postgres.drop(name)


@contextmanager
def _servers(are_wanted: bool) -> Iterator[tuple[Postgres, Redis] | None]:
    if not are_wanted:
        yield None
        return
    postgres = Postgres()
    try:
        redis_server = Redis()
        try:
            yield postgres, redis_server
        finally:
            redis_server.close()
    finally:
        postgres.close()


if __name__ == "__main__":
    main()
