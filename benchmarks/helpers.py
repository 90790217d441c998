"""One job on one worker next to several that share it: `python -m benchmarks.helpers --model FOLDER`.

A service on Postgres and Redis with workers of one thread each, which needs as many idle cores. It prints the seconds
of the stages that workers share and of the whole job as a table in Markdown, and exits with 1 if weights differ.
"""

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.e2e.deployment import Deployment
from tests.servers import Postgres, Redis

_SHARED = ("calibrating", "factorizing")


def measured(given: argparse.Namespace, folder: Path, workers: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the report of the job on some workers, and the hashes of its files."""
    with closing(Postgres()) as postgres, closing(Redis()) as redis:
        data = folder / "data"
        (data / "models").mkdir(parents=True)
        (data / "models" / "measured").symlink_to(given.model.resolve())
        service = Deployment(
            data,
            workers=workers,
            ROCKET_HELP_JOBS="true",
            ROCKET_DATABASE_URL=postgres.url(postgres.create()),
            ROCKET_BROKER_URL=redis.url,
        )
        try:
            job_id = service.submit(
                model_id="local/measured",
                bits=given.bits,
                calibration={"samples": given.samples, "sequence_length": given.length},
            )
            ended = {"succeeded", "failed", "cancelled"}
            job = service.wait(job_id, until=lambda job: job["status"] in ended, seconds=36_000, look_seconds=1.0)
            if job["status"] != "succeeded":
                sys.exit(f"{service.log.read_text()[-3000:]}\nthe job has {job['status']}: {job['error']}")
            return service.client.get(f"/jobs/{job_id}/report").raise_for_status().json(), service.hashes(job_id)
        finally:
            service.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--bits", type=float, default=4.0, help="bits per weight")
    parser.add_argument("--samples", type=int, default=16, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    print("| workers |" + "".join(f" {stage}, s |" for stage in _SHARED) + " all stages, s |")
    print("|---" * (2 + len(_SHARED)) + "|")
    found = []
    for workers in given.workers:
        with tempfile.TemporaryDirectory() as folder:
            report, hashes = measured(given, Path(folder), workers)
        found.append(hashes)
        seconds = {stage["name"]: stage["seconds"] for stage in report["stages"]}
        cells = [*(seconds[stage] for stage in _SHARED), sum(seconds.values())]
        print(f"| {workers} |" + "".join(f" {cell:.0f} |" for cell in cells), flush=True)
    if any(hashes != found[0] for hashes in found):
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()
