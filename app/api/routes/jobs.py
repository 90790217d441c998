"""`/jobs`: submitting, watching and controlling jobs."""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from app.api.acceptance import SubmissionDep, accepted, creates_job, hint
from app.api.dependencies import ActorDep, ContextDep, HubTokenDep, JobId, LabelsDep, OwnerDep
from app.api.ids import AfterJob, PageSize
from app.api.json_bodies import JsonRoute
from app.api.negotiation import check_preconditions
from app.api.prefer_wait import WaitDep, wait_for_end
from app.api.problems import problems
from app.api.resources import JobList, JobView, LayerList
from app.api.serializers import current_view, current_views, job_view, layer_view
from app.services import jobs, outputs
from app.shared.lifecycle import Status
from app.shared.repositories.jobs import JobFilter
from app.shared.requests import CompressionRequest

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=JsonRoute)

# The framework cannot declare `metadata[key]=value`.
_LABELS: dict[str, Any] = {
    "name": "metadata",
    "in": "query",
    "description": "`metadata[key]=value`: only jobs with this label; several must all be there.",
    "style": "deepObject",
    "explode": True,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


@router.post("", **creates_job(503))
async def submit_job(body: CompressionRequest, submission: SubmissionDep) -> JobView:
    """Submit a compression job; a replay with the same `Idempotency-Key` returns 200 and the first request's job.

    Requests that are impossible according to the model's config.json and safetensors headers are refused here, with the
    code that the job would fail with.
    """
    return await submission.accept(body)


@router.get("", responses=problems(422), openapi_extra={"parameters": [_LABELS]})
def list_jobs(
    context: ContextDep,
    owner: OwnerDep,
    labels: LabelsDep,
    after: AfterJob = None,
    limit: PageSize = 20,
    status: Annotated[Status | None, Query(description="Return only jobs with this status.")] = None,
) -> JobList:
    """List jobs, newest first."""
    choice = JobFilter(status=status, metadata=labels)
    page, has_more = jobs.list_jobs(context, owner, choice, after=after, limit=limit)
    return JobList(
        data=current_views(context, page),
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses=problems(404, 412) | {304: {"description": "The client already has this version"}},
)
async def get_job(
    job_id: JobId, request: Request, response: Response, context: ContextDep, owner: OwnerDep, wait: WaitDep
) -> JobView | Response:
    """Return a job; `Retry-After` says when to poll again."""
    job = await run_in_threadpool(jobs.get_job, context, owner, job_id)
    job = await wait_for_end(request, response, context, job, wait)
    view = await run_in_threadpool(current_view, context, job)
    hint(response, job)
    response.headers["ETag"] = _entity_tag(view)
    response.headers["Cache-Control"] = "private, no-cache"
    return check_preconditions(request.headers, response.headers) or view


@router.post(
    "/{job_id}/cancel",
    responses=problems(404, 409) | {202: {"model": JobView, "description": "The worker was asked to stop"}},
)
def cancel_job(job_id: JobId, response: Response, context: ContextDep, actor: ActorDep) -> JobView:
    """Cancel a job: a queued one at once (200), a running one as soon as its worker notices (202)."""
    job = jobs.cancel_job(context, actor, job_id)
    if job.status == Status.CANCELLING:
        response.status_code = status.HTTP_202_ACCEPTED
        hint(response, job)
    return job_view(job)


@router.post("/{job_id}/retry", status_code=status.HTTP_202_ACCEPTED, responses=problems(404, 409, 410, 422))
def retry_job(
    job_id: JobId, response: Response, context: ContextDep, actor: ActorDep, hub_token: HubTokenDep
) -> JobView:
    """Retry a failed or cancelled job as a new job, which resumes from the checkpoints. The call is idempotent.

    A Hub token is deleted when its job ends: send it again with the retry of a job that needs one.
    """
    return accepted(response, jobs.retry_job(context, actor, job_id, hub_token).job)


@router.delete("/{job_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404, 409, 412))
def delete_job(job_id: JobId, request: Request, context: ContextDep, actor: ActorDep) -> None:
    """Delete a job that has ended, with its artifacts; with `If-Match`, only the version that the client knows."""
    if "if-match" in request.headers:
        view = current_view(context, jobs.get_job(context, actor.tenant, job_id))
        check_preconditions(request.headers, {"ETag": _entity_tag(view)})
    jobs.delete_job(context, actor, job_id)


@router.get("/{job_id}/layers", responses=problems(404))
def list_layers(job_id: JobId, context: ContextDep, owner: OwnerDep) -> LayerList:
    """List the layers profiled so far, with their candidates and the one chosen."""
    return LayerList(data=[layer_view(layer) for layer in outputs.list_layers(context, owner, job_id)])


def _entity_tag(view: JobView) -> str:
    return f'"{hashlib.sha256(view.model_dump_json().encode()).hexdigest()[:32]}"'
