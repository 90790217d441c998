"""`/jobs/{id}/exports`: the result of a finished job in other formats, made later."""

from fastapi import APIRouter, Request, Response, status

from app.api.acceptance import accept_job
from app.api.dependencies import (
    JSON_BODY,
    ActorDep,
    AdmissionDep,
    ContextDep,
    IdempotencyKeyDep,
    JobId,
    OwnerDep,
)
from app.api.json_bodies import JsonRoute
from app.api.prefer_wait import WaitDep
from app.api.problems import problems
from app.api.resources import ExportList, JobView
from app.api.serializers import job_view
from app.services import exports
from app.shared.requests import ExportRequest

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"], route_class=JsonRoute)


@router.post(
    "/exports",
    status_code=status.HTTP_202_ACCEPTED,
    dependencies=[JSON_BODY],
    responses=problems(400, 404, 409, 410, 413, 415, 422, 507)
    | {200: {"model": JobView, "description": "The job created by an earlier request with the same key"}},
)
async def export_job(
    job_id: JobId,
    body: ExportRequest,
    request: Request,
    response: Response,
    context: ContextDep,
    actor: ActorDep,
    threads: AdmissionDep,
    key: IdempotencyKeyDep,
    wait: WaitDep,
) -> JobView:
    """Submit a job that writes the `factored` artifact of a succeeded job in another format, with the same weights.

    Every artifact has a dense export. The other formats hold only some of the ways in which layers are stored; where
    they do not, the request is refused, and the message says how to compress for them instead. The files are artifacts
    of the new job.
    """
    job_request = await threads.run(exports.export_request, context, actor.tenant, job_id, body)
    return await accept_job(job_request, request, response, context, actor, threads, key, None, wait)


@router.get("/exports", responses=problems(404))
def list_exports(job_id: JobId, context: ContextDep, owner: OwnerDep) -> ExportList:
    """List the latest 100 jobs that write the result of a job in other formats, newest first."""
    return ExportList(data=[job_view(job) for job in exports.list_exports(context, owner, job_id)])
