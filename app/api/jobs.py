"""`/jobs`: submitting, watching and steering."""

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from app.api.dependencies import ContextDep, IdempotencyKeyDep, JobId, OwnerDep
from app.api.errors import problems
from app.api.views import JobList, JobView, LayerList, job_path, job_view, layer_view
from app.services import jobs, outputs
from app.shared.lifecycle import Status
from app.shared.models import Job
from app.shared.requests import JobRequest

router = APIRouter(prefix="/jobs", tags=["jobs"])

# How soon a client that polls should look again, in seconds.
_POLL_SECONDS = 2


@router.post(
    "",
    status_code=status.HTTP_202_ACCEPTED,
    responses=problems(400, 413, 422) | {200: {"model": JobView, "description": "The job of an earlier request"}},
)
def submit_job(
    request: JobRequest, response: Response, context: ContextDep, owner: OwnerDep, key: IdempotencyKeyDep
) -> JobView:
    """Accepts a compression; a replay under the same `Idempotency-Key` answers 200 with the job of the first."""
    submission = jobs.submit_job(context, owner, request, key)
    if not submission.created:
        response.status_code = status.HTTP_200_OK
        response.headers["Idempotent-Replayed"] = "true"
    return _accepted(response, submission.job)


@router.get("", responses=problems(422))
def list_jobs(
    context: ContextDep,
    owner: OwnerDep,
    after: Annotated[str | None, Query(pattern=r"^job_[0-9a-z]{26}$")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    status: Status | None = None,
) -> JobList:
    """Jobs, newest first."""
    page, has_more = jobs.list_jobs(context, owner, after=after, limit=limit, status=status)
    return JobList(
        data=[job_view(job) for job in page],
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


@router.get("/{job_id}", responses=problems(404))
def get_job(job_id: JobId, response: Response, context: ContextDep, owner: OwnerDep) -> JobView:
    """One job; `Retry-After` says when to look again."""
    job = jobs.get_job(context, owner, job_id)
    _hint(response, job)
    return job_view(job)


@router.post(
    "/{job_id}/cancel",
    responses=problems(404, 409) | {202: {"model": JobView, "description": "The worker was asked to stop"}},
)
def cancel_job(job_id: JobId, response: Response, context: ContextDep, owner: OwnerDep) -> JobView:
    """Cancels a job: at once (200) if it waits, as soon as its worker notices (202) if it runs."""
    job = jobs.cancel_job(context, owner, job_id)
    if job.status == Status.CANCELLING:
        response.status_code = status.HTTP_202_ACCEPTED
        _hint(response, job)
    return job_view(job)


@router.post("/{job_id}/retry", status_code=status.HTTP_202_ACCEPTED, responses=problems(404, 409))
def retry_job(job_id: JobId, response: Response, context: ContextDep, owner: OwnerDep) -> JobView:
    """Makes a new job of a failed or cancelled one; it goes on from the checkpoints. Repeating it changes nothing."""
    return _accepted(response, jobs.retry_job(context, owner, job_id).job)


@router.delete("/{job_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404, 409))
def delete_job(job_id: JobId, context: ContextDep, owner: OwnerDep) -> None:
    """Deletes a job that has ended, with its artifacts."""
    jobs.delete_job(context, owner, job_id)


@router.get("/{job_id}/layers", responses=problems(404))
def list_layers(job_id: JobId, context: ContextDep, owner: OwnerDep) -> LayerList:
    """The layers profiled so far: the candidates of each, and which it got."""
    return LayerList(data=[layer_view(layer) for layer in outputs.list_layers(context, owner, job_id)])


def _accepted(response: Response, job: Job) -> JobView:
    response.headers["Location"] = job_path(job)
    _hint(response, job)
    return job_view(job)


def _hint(response: Response, job: Job) -> None:
    if not Status(job.status).is_terminal:
        response.headers["Retry-After"] = str(_POLL_SECONDS)
