"""Acceptance of a job of any kind: what endpoints that create one receive, and how they respond."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response, status

from app.api.dependencies import (
    JSON_BODY,
    ActorDep,
    AdmissionDep,
    ContextDep,
    HubTokenDep,
    IdempotencyKeyDep,
)
from app.api.prefer_wait import WaitDep, wait_for_end
from app.api.problems import problems
from app.api.resources import JobView
from app.api.serializers import job_path, job_view
from app.services import jobs
from app.shared.lifecycle import Status
from app.shared.models import Job
from app.shared.requests import JobRequest

# Polling interval suggested to clients, in seconds.
_POLL_SECONDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A request that creates a job, without its body."""

    request: Request
    response: Response
    context: ContextDep
    actor: ActorDep
    threads: AdmissionDep
    key: IdempotencyKeyDep
    hub_token: HubTokenDep
    wait: WaitDep

    async def accept(self, job_request: JobRequest) -> JobView:
        """Create a job, or find that of an earlier request, and return it; raise the errors of `jobs.submit_job`."""
        submitted = await self.threads.run(
            jobs.submit_job, self.context, self.actor, job_request, self.key, self.hub_token
        )
        if not submitted.created:
            self.response.status_code = status.HTTP_200_OK
            self.response.headers["Idempotent-Replayed"] = "true"
        job = await wait_for_end(self.request, self.response, self.context, submitted.job, self.wait)
        return accepted(self.response, job)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenlessSubmission(Submission):
    """A request that creates a job which needs nothing of the Hub."""

    hub_token: Annotated[None, Depends(lambda: None)]


SubmissionDep = Annotated[Submission, Depends()]
TokenlessSubmissionDep = Annotated[TokenlessSubmission, Depends()]


def creates_job(*statuses: int) -> dict[str, Any]:
    """Return the settings of an endpoint that creates a job, given the statuses that not every such endpoint has."""
    replayed = {"model": JobView, "description": "The job created by an earlier request with the same key"}
    return {
        "status_code": status.HTTP_202_ACCEPTED,
        "dependencies": [JSON_BODY],
        "responses": problems(400, 404, 409, 413, 415, 422, 507, *statuses) | {200: replayed},
    }


def accepted(response: Response, job: Job) -> JobView:
    """Return an accepted job, and set the headers that say where it is and when to look again."""
    response.headers["Location"] = job_path(job)
    hint(response, job)
    return job_view(job)


def hint(response: Response, job: Job) -> None:
    """Set `Retry-After`, as long as a job has not ended."""
    if not Status(job.status).is_terminal:
        response.headers["Retry-After"] = str(_POLL_SECONDS)
