"""`/jobs/{id}/healings`, `/evaluations`, `/exports` and `/pushes`: work on the result of a finished job."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Any

from fastapi import APIRouter

from app.api.acceptance import SubmissionDep, TokenlessSubmissionDep, creates_job
from app.api.dependencies import ContextDep, JobId, OwnerDep
from app.api.json_bodies import JsonRoute
from app.api.problems import problems
from app.api.resources import WORK_LISTS, JobView
from app.api.serializers import work_view
from app.services import works
from app.shared.requests import WORK_REQUESTS, WorkRequest
from app.shared.works import WORKS, Work, WorkKind

router = APIRouter(prefix="/jobs/{job_id}", route_class=JsonRoute)


def _submits(work: Work) -> Callable[..., Any]:
    """Return the endpoint that submits a job which does a kind of work."""

    async def submit(job_id: JobId, body: WorkRequest, submission: SubmissionDep) -> JobView:
        owner = submission.actor.tenant
        job_request = await submission.threads.run(works.job_request, submission.context, owner, job_id, body)
        return await submission.accept(job_request)

    # What the framework reads: a type per kind of work.
    takes_token = work.reads_model or work.pushes
    submit.__annotations__["body"] = WORK_REQUESTS[work.kind]
    submit.__annotations__["submission"] = SubmissionDep if takes_token else TokenlessSubmissionDep
    return submit


def _lists(kind: WorkKind) -> Callable[..., Any]:
    """Return the endpoint that lists such jobs."""

    def list_work(job_id: JobId, context: ContextDep, owner: OwnerDep) -> Any:
        found = works.list_work(context, owner, job_id, kind)
        return {"data": [work_view(work) for work in found]}

    return list_work


for _work in WORKS.values():
    # The Hub may be asked about a model that is calibrated, and cannot be pushed to while it is unreachable.
    _unavailable = (503,) if _work.reads_calibration or _work.pushes else ()
    router.add_api_route(
        f"/{_work.path}",
        _submits(_work),
        methods=["POST"],
        name=_work.endpoint,
        description=cleandoc(_work.about),
        tags=[_work.tag],
        **creates_job(410, *_unavailable),
    )
    if _work.listed is not None:
        router.add_api_route(
            f"/{_work.path}",
            _lists(_work.kind),
            methods=["GET"],
            name=f"list_{_work.path}",
            description=cleandoc(_work.listed),
            tags=[_work.tag],
            response_model=WORK_LISTS[_work.kind],
            responses=problems(404),
        )
