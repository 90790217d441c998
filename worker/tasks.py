"""Handlers for messages to the worker: one short function per message."""

from celery import Celery

from app.shared.queue import RUN_JOB
from worker.failures import log_failures
from worker.runner import Runner


def register_tasks(celery: Celery, runner: Runner) -> None:
    """Register every task under the name that `app.shared.queue` knows it by."""

    def run_job(job_id: str) -> None:
        # A message is a hint: the job may be claimed, ended or deleted. If this worker is busy, polling finds it later.
        log_failures("running a job", lambda: runner.run(job_id))

    # A shared task would be registered, with this runner, in every other Celery app of this process.
    celery.task(run_job, name=RUN_JOB, shared=False)
