"""`/jobs/{id}/evaluations`: quality of a finished job's artifact, measured later."""

from fastapi import APIRouter, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from app.api.acceptance import accept_job
from app.api.dependencies import (
    JSON_BODY,
    ActorDep,
    AdmissionDep,
    ContextDep,
    HubTokenDep,
    IdempotencyKeyDep,
    JobId,
    OwnerDep,
)
from app.api.json_bodies import JsonRoute
from app.api.prefer_wait import WaitDep
from app.api.problems import problems
from app.api.resources import EvaluationList, JobView
from app.api.serializers import evaluation_view
from app.services import evaluations
from app.shared.requests import EvaluationRequest

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"], route_class=JsonRoute)


@router.post(
    "/evaluations",
    status_code=status.HTTP_202_ACCEPTED,
    dependencies=[JSON_BODY],
    responses=problems(400, 404, 409, 410, 413, 415, 422, 507)
    | {200: {"model": JobView, "description": "The job created by an earlier request with the same key"}},
)
async def evaluate_job(
    job_id: JobId,
    body: EvaluationRequest,
    request: Request,
    response: Response,
    context: ContextDep,
    actor: ActorDep,
    threads: AdmissionDep,
    key: IdempotencyKeyDep,
    hub_token: HubTokenDep,
    wait: WaitDep,
) -> JobView:
    """Submit a job that compares the artifact of a succeeded compression with its original.

    It reads a text, zero-shot tasks, and prompts that both models answer. An empty object takes all defaults.
    """
    job_request = await run_in_threadpool(evaluations.evaluation_request, context, actor.tenant, job_id, body)
    return await accept_job(job_request, request, response, context, actor, threads, key, hub_token, wait)


@router.get("/evaluations", responses=problems(404))
def list_evaluations(job_id: JobId, context: ContextDep, owner: OwnerDep) -> EvaluationList:
    """List the latest 100 evaluations of a job's artifact, newest first; its own evaluation is in its report.

    Only the newest 3 have `answers`.
    """
    found = evaluations.list_evaluations(context, owner, job_id)
    return EvaluationList(data=[evaluation_view(evaluation) for evaluation in found])
