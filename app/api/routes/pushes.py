"""`/jobs/{id}/pushes`: the result of a finished job, pushed to a repository on the Hub."""

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
from app.api.resources import JobView, PushList
from app.api.serializers import push_view
from app.services import pushes
from app.services.hub_tokens import choose_push_token
from app.shared.requests import PushRequest

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"], route_class=JsonRoute)


@router.post(
    "/pushes",
    status_code=status.HTTP_202_ACCEPTED,
    dependencies=[JSON_BODY],
    responses=problems(400, 404, 409, 410, 413, 415, 422, 503, 507)
    | {200: {"model": JobView, "description": "The job created by an earlier request with the same key"}},
)
async def push_job(
    job_id: JobId,
    body: PushRequest,
    request: Request,
    response: Response,
    context: ContextDep,
    actor: ActorDep,
    threads: AdmissionDep,
    key: IdempotencyKeyDep,
    hub_token: HubTokenDep,
    wait: WaitDep,
) -> JobView:
    """Submit a job that pushes the files of a succeeded job to a repository on the Hub, in one commit.

    The header `Hub-Token` has a token with write access; without it the server uses its own, which only the user of a
    server without API keys may do. Files that the repository has already are not sent again.
    """
    job_request = await run_in_threadpool(pushes.push_request, context, actor.tenant, job_id, body)
    token = await run_in_threadpool(choose_push_token, context.settings, actor, hub_token)
    return await accept_job(job_request, request, response, context, actor, threads, key, token, wait)


@router.get("/pushes", responses=problems(404))
def list_pushes(job_id: JobId, context: ContextDep, owner: OwnerDep) -> PushList:
    """List the latest 100 pushes of a job's files to the Hub, newest first."""
    return PushList(data=[push_view(push) for push in pushes.list_pushes(context, owner, job_id)])
