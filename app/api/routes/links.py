"""`/jobs/{id}/link`: the link that shows a job to people without a key."""

from fastapi import APIRouter, Request, status

from app.api.dependencies import JSON_BODY, ActorDep, ContextDep, JobId, OwnerDep
from app.api.json_bodies import JsonRoute
from app.api.paths import SHARED
from app.api.problems import problems
from app.api.resources import LinkView, NewLinkView
from app.api.serializers import link_view
from app.services import links
from app.shared.resource_requests import LinkRequest

router = APIRouter(prefix="/jobs/{job_id}/link", tags=["results"], route_class=JsonRoute)


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    dependencies=[JSON_BODY],
    responses=problems(400, 404, 409, 413, 415, 422),
)
def create_link(
    job_id: JobId, body: LinkRequest, request: Request, context: ContextDep, actor: ActorDep
) -> NewLinkView:
    """Create a link that shows a succeeded job to anyone who has it; its address is shown only once.

    A job has one link: creating another ends it.
    """
    row, token = links.create_link(context, actor, job_id, with_files=body.with_files)
    return NewLinkView(**link_view(row).model_dump(), url=link_url(request, token))


@router.get("", responses=problems(404))
def get_link(job_id: JobId, context: ContextDep, owner: OwnerDep) -> LinkView:
    """Return the link of a job, without its address."""
    row = links.find_link(context, owner, job_id)
    if row is None:
        raise links.no_link()
    return link_view(row)


@router.delete("", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404))
def delete_link(job_id: JobId, context: ContextDep, actor: ActorDep) -> None:
    """End the link of a job."""
    links.end_link(context, actor, job_id)


def link_url(request: Request, token: str) -> str:
    """Return the address of a link, at the host that the request was sent to."""
    return f"{str(request.base_url).rstrip('/')}{SHARED}/{token}"
