"""Soak test of `make soak`, which kills jobs and services at random moments and checks invariants.

Each round submits a job, strikes at random times, and compares the result with that of an uninterrupted job, byte by
byte.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks import kill_matrix
from tests.e2e.service_process import Service

MODEL = Path(__file__).parents[1] / "examples" / "tiny-llama"
REQUEST = {"model_id": "local/tiny-llama", "ratio": 0.3, "calibration": {"samples": 8, "sequence_length": 128}}
ATTEMPTS = 100
LAYERS = 42


def main() -> None:
    """Strike and check; raise at the first broken invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--strikes", type=int, default=5, help="per round")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--no-matrix", action="store_true", help="leave out the kill matrix")
    given = parser.parse_args()
    if not given.no_matrix:
        kill_matrix.run(["embedded", "postgres"], list(kill_matrix.POINTS))
    chance = random.Random(given.seed)  # noqa: S311  # moments, no secrets
    print(f"seed {given.seed}: {given.rounds} rounds of {given.strikes} strikes")
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        shutil.copytree(MODEL, data_dir / "models" / "tiny-llama")
        service = Service(data_dir, ROCKET_MAX_ATTEMPTS=str(ATTEMPTS), ROCKET_LEASE_SECONDS="5")
        try:
            soak(service, chance, rounds=given.rounds, strikes=given.strikes)
        except BaseException:
            print(service.log.read_text()[-5000:])
            raise
        finally:
            service.close()


def soak(service: Service, chance: random.Random, *, rounds: int, strikes: int) -> None:
    """Run all rounds."""
    began = time.monotonic()
    first = service.submit(**REQUEST)
    assert service.finished(first)["status"] == "succeeded"
    seconds = time.monotonic() - began
    expected = service.hashes(first)
    print(f"uninterrupted: {seconds:.1f} s, {len(expected)} files")
    struck_at: Counter[str] = Counter()
    for number in range(1, rounds + 1):
        job_id = service.submit(**REQUEST)
        for _ in range(strikes):
            time.sleep(chance.uniform(0, seconds))
            strike(service, job_id, chance, struck_at)
        job = service.finished(job_id)
        assert job["status"] == "succeeded", job
        assert service.hashes(job_id) == expected, job
        check_rows(service, job_id)
        print(f"round {number}: attempt {job['attempt']}, artifacts equal")
    assert not service.children()
    print("struck:", ", ".join(f"{count} x {place}" for place, count in struck_at.most_common()))


def strike(service: Service, job_id: str, chance: random.Random, struck_at: Counter[str]) -> None:
    """Kill the job's process or the service, or stop the service in order."""
    job = service.job(job_id)
    place = job["stage"] if job["status"] == "running" and job["stage"] else job["status"]
    how = chance.choice(["job", "service", "stop"])
    if how == "job":
        service.kill_job()
    elif how == "service":
        service.kill()
        service.start()
    else:
        assert service.stop() == 0
        service.start()
    struck_at[f"{how} while {place}"] += 1


def check_rows(service: Service, job_id: str) -> None:
    """Check that every layer occurs once, that events have no gaps, and that no work folder is left."""
    events: list[dict] = []
    while page := service.client.get(f"/jobs/{job_id}/events", params={"after": len(events)}).json()["data"]:
        events += page
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    told = Counter(event["data"]["layer"] for event in events if event["type"] == "layer")
    assert len(told) == LAYERS, told
    assert set(told.values()) == {1}, told
    assert len(service.client.get(f"/jobs/{job_id}/layers").json()["data"]) == LAYERS
    assert not list((service.data_dir / "work").iterdir())


if __name__ == "__main__":
    main()
