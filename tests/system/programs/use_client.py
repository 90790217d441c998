"""Compress a model with a client that openapi-python-client has generated, and nothing of Rocket installed.

    python use_client.py URL OUT

It writes the artifacts into OUT and prints the job and the report's version as JSON.
"""

import json
import sys
import time
from pathlib import Path

from generated import Client
from generated.api.jobs import get_job, submit_job
from generated.api.results import download_artifact, get_report, list_artifacts
from generated.models import CalibrationRequest, CompressionRequest


def main() -> None:
    """Submit, wait, and download."""
    client, out = Client(base_url=sys.argv[1]), Path(sys.argv[2])
    calibration = CalibrationRequest(samples=2, sequence_length=16)
    job = submit_job.sync(client=client, body=CompressionRequest("local/tiny", ratio=0.3, calibration=calibration))
    while job.finished_at is None:
        time.sleep(0.2)
        job = get_job.sync(job.id, client=client)
    for artifact in list_artifacts.sync(job.id, client=client).data:
        file = out / artifact.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(download_artifact.sync(job.id, artifact.name, client=client).payload.read())
    version = get_report.sync(job.id, client=client).report_version
    sys.stdout.write(json.dumps({"id": job.id, "status": job.status, "report_version": version}))


if __name__ == "__main__":
    main()
