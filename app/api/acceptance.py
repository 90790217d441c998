"""Acceptance of a job of any kind: the response to requests that create one."""

from fastapi import Request, Response, status
from pydantic import SecretStr

from app.api.prefer_wait import wait_for_end
from app.api.resources import JobView
from app.api.serializers import job_path, job_view
from app.api.tenant_shares import Threads
from app.services import jobs
from app.services.context import Context
from app.shared.lifecycle import Status
from app.shared.models import Job
from app.shared.repositories.audit import Actor
from app.shared.requests import JobRequest

# Polling interval suggested to clients, in seconds.
_POLL_SECONDS = 2


async def accept_job(
    job_request: JobRequest,
    request: Request,
    response: Response,
    context: Context,
    actor: Actor,
    threads: Threads,
    key: str | None,
    hub_token: SecretStr | None,
    wait: int,
) -> JobView:
    """Create a job, or find that of an earlier request, and return it; raise the errors of `jobs.submit_job`."""
    submission = await threads.run(jobs.submit_job, context, actor, job_request, key, hub_token)
    if not submission.created:
        response.status_code = status.HTTP_200_OK
        response.headers["Idempotent-Replayed"] = "true"
    return accepted(response, await wait_for_end(request, response, context, submission.job, wait))


def accepted(response: Response, job: Job) -> JobView:
    """Return an accepted job, and set the headers that say where it is and when to look again."""
    response.headers["Location"] = job_path(job)
    hint(response, job)
    return job_view(job)


def hint(response: Response, job: Job) -> None:
    """Set `Retry-After`, as long as a job has not ended."""
    if not Status(job.status).is_terminal:
        response.headers["Retry-After"] = str(_POLL_SECONDS)
