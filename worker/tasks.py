"""What the worker does when a message arrives: one short function per message."""

from celery import Celery

from app.shared.queue import RUN_JOB
from worker.failures import attempted
from worker.runner import Runner


def register_tasks(celery: Celery, runner: Runner) -> None:
    """Registers every task under the name that `app.shared.queue` knows it by."""

    def run_job(job_id: str) -> None:
        # A message is a hint: the job may be taken, ended or gone, and if this worker is busy, polling finds it later.
        attempted("running a job", lambda: runner.run(job_id))

    # Shared, it would also be that of every other application of this process, with this runner.
    celery.task(run_job, name=RUN_JOB, shared=False)
