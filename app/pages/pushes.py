"""`/ui/jobs/{id}/pushes`: the files of a job, pushed to the Hub."""

import secrets
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from app.api.dependencies import ActorDep, AdmissionDep, ContextDep, JobId, OwnerDep, read_hub_token
from app.api.paths import PAGES
from app.api.serializers import job_view, push_view
from app.pages.forms import Fields, FieldsDep, idempotency_key
from app.pages.rendering import redirect, render
from app.services import jobs, pushes
from app.services.context import Context
from app.services.hub_tokens import choose_push_token
from app.shared.errors import InvalidRequestError
from app.shared.repositories.audit import Actor
from app.shared.requests import PushRequest
from rocket_core.errors import UploadTokenError

router = APIRouter(include_in_schema=False)

_JOB = f"{PAGES}/jobs/{{job_id}}"


@router.get(f"{_JOB}/pushes")
def show_pushes(request: Request, job_id: JobId, context: ContextDep, owner: OwnerDep) -> Response:
    """Show what became of a job's pushes to the Hub."""
    job = job_view(jobs.get_job(context, owner, job_id))
    return render(request, "job_push_list.html.j2", job=job, pushes=_list(context, owner, job_id))


@router.post(f"{_JOB}/pushes")
async def push(
    request: Request, job_id: JobId, context: ContextDep, actor: ActorDep, threads: AdmissionDep, fields: FieldsDep
) -> Response:
    """Create a job that pushes the files of this one to the Hub, and show this one."""
    return await threads.run(_push, request, context, actor, job_id, fields)


def push_section(context: Context, actor: Actor, job_id: str) -> dict[str, Any]:
    """Return what the page of a job shows of its pushes.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    return {
        "pushes": _list(context, actor.tenant, job_id),
        "pushable": pushes.list_exports(context, actor.tenant, job_id),
        "needs_token": not _has_token(context, actor),
        "push_form": secrets.token_urlsafe(16),
    }


def _push(request: Request, context: Context, actor: Actor, job_id: str, fields: Fields) -> Response:
    body = {"repository": fields.get("repository", "").strip(), "private": bool(fields.get("private"))}
    try:
        wanted = PushRequest.model_validate(body | {"export": fields.get("export") or None})
    except ValidationError as error:
        name = str(error.errors(include_input=False)[0]["loc"][0])
        told = {"repository": "write the repository as NAMESPACE/NAME, such as my-name/my-smaller-model"}
        raise InvalidRequestError(told.get(name, "choose one of the exports of this job"), param=name) from None
    sent = fields.get("hub_token", "").strip()
    if not sent and not _has_token(context, actor):
        raise InvalidRequestError("enter a Hub token with write access; it is deleted when the push ends")
    token = choose_push_token(context.settings, actor, read_hub_token(sent) if sent else None)
    job_request = pushes.push_request(context, actor.tenant, job_id, wanted)
    jobs.submit_job(context, actor, job_request, idempotency_key(fields, job_request), token)
    return redirect(request, f"{PAGES}/jobs/{job_id}#push")


def _has_token(context: Context, actor: Actor) -> bool:
    try:
        choose_push_token(context.settings, actor, None)
    except UploadTokenError:
        return False
    return True


def _list(context: Context, owner: str, job_id: str) -> list[Any]:
    return [push_view(push) for push in pushes.list_pushes(context, owner, job_id)]
