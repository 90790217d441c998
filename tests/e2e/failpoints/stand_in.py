"""A stand-in for `python -m worker.attempt.job`, which keeps the lease and succeeds without torch or any work.

Only for a job whose metadata says `work: none`; any other is passed to the real program.
"""

import os
import sys
import time
from datetime import timedelta

from app.shared.database import Database
from app.shared.outcomes import JobResult
from app.shared.repositories import jobs, leases, outputs
from app.shared.repositories.leases import Lease
from app.shared.settings import load_settings
from tests.reference.reports import empty_report
from worker.attempt.lease import LeaseKeeper
from worker.attempt.writer import ProgressWriter
from worker.processes.linux import die_with

WORK_SECONDS = 0.5
RESULT = JobResult(achieved_ratio=0, kept_parameters=1, compressible_parameters=1, stored_bytes=1, dense_bytes=1)


def main():
    job_id, fence, parent = sys.argv[1:4]
    settings = load_settings()
    database, lease = Database(settings.database), Lease(job_id=job_id, fence=fence)
    with database.snapshot() as session:
        metadata = jobs.get_job(session, job_id).request["metadata"]
    if metadata.get("work") != "none":
        database.close()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "worker.attempt.job", *sys.argv[1:]])  # noqa: S606
    die_with(int(parent))
    writer = ProgressWriter(database, lease, patience=settings.lease_seconds, max_profiles=settings.max_profiles)
    writer.write(leases.lock_leased_job)
    with LeaseKeeper(database, lease, settings, parent=int(parent), on_stop=lambda: None):
        time.sleep(WORK_SECONDS)
    finished = {"result": RESULT, "report": empty_report(), "artifacts": (), "retention": timedelta(days=1)}
    writer.write(outputs.succeed_job, **finished)
    database.close()


if __name__ == "__main__":
    main()
