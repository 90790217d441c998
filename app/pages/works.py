"""`/ui/jobs/{id}/...`: work on the result of a finished job, and what became of it."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from app.api.dependencies import ActorDep, AdmissionDep, ContextDep, JobId, OwnerDep, read_hub_token
from app.api.paths import PAGES
from app.api.serializers import job_view, work_view
from app.pages.forms import Fields, FieldsDep, InvalidFieldsError, idempotency_key, read_evaluation
from app.pages.rendering import redirect, render
from app.services import exports, jobs, works
from app.services.context import Context
from app.services.hub_tokens import choose_push_token
from app.shared.errors import InvalidRequestError
from app.shared.lifecycle import Status
from app.shared.repositories.audit import Actor
from app.shared.requests import EvaluationRequest, ExportRequest, HealingRequest, PushRequest, WorkRequest
from app.shared.works import WORKS, WorkKind
from rocket_core.errors import UploadTokenError
from rocket_core.sizes.token_counts import parse_tokens

router = APIRouter(include_in_schema=False)

_JOB = f"{PAGES}/jobs/{{job_id}}"
# Where the page of the earlier job shows what was submitted; for other work it is the page of the new job.
_SECTIONS = {"export": "exports", "push": "push"}


def _read_healing(fields: Fields) -> HealingRequest:
    try:
        return HealingRequest(tokens=parse_tokens(fields.get("tokens", "")))
    except ValueError:
        raise InvalidRequestError(
            "write how many tokens to train on, such as 500k or 2M, at most 1000G", param="tokens"
        ) from None


def _read_evaluation(fields: Fields) -> EvaluationRequest:
    try:
        return read_evaluation(fields)
    except InvalidFieldsError as error:
        raise InvalidRequestError(str(error)) from None


def _read_export(fields: Fields) -> ExportRequest:
    try:
        return ExportRequest.model_validate({"to": fields.get("to")})
    except ValidationError:
        raise InvalidRequestError("choose dense, gguf or compressed-tensors", param="to") from None


def _read_push(fields: Fields) -> PushRequest:
    body = {"repository": fields.get("repository", "").strip(), "private": bool(fields.get("private"))}
    try:
        return PushRequest.model_validate(body | {"export": fields.get("export") or None})
    except ValidationError as error:
        name = str(error.errors(include_input=False)[0]["loc"][0])
        told = {"repository": "write the repository as NAMESPACE/NAME, such as my-name/my-smaller-model"}
        raise InvalidRequestError(told.get(name, "choose one of the exports of this job"), param=name) from None


_FORMS: Mapping[WorkKind, Callable[[Fields], WorkRequest]] = {
    "healing": _read_healing,
    "evaluation": _read_evaluation,
    "export": _read_export,
    "push": _read_push,
}


def _submits(kind: WorkKind) -> Callable[..., Any]:
    """Return the endpoint that reads a form, creates the job that does the work, and shows what it is doing."""

    async def submit(
        request: Request, job_id: JobId, context: ContextDep, actor: ActorDep, threads: AdmissionDep, fields: FieldsDep
    ) -> Response:
        return await threads.run(_submit, request, context, actor, kind, job_id, fields)

    return submit


def _submit(request: Request, context: Context, actor: Actor, kind: WorkKind, job_id: str, fields: Fields) -> Response:
    wanted = _FORMS[kind](fields)
    sent = fields.get("hub_token", "").strip()
    if WORKS[kind].pushes and not sent and not _has_token(context, actor):
        raise InvalidRequestError("enter a Hub token with write access; it is deleted when the push ends")
    token = read_hub_token(sent) if sent else None
    job_request = works.job_request(context, actor.tenant, job_id, wanted)
    job = jobs.submit_job(context, actor, job_request, idempotency_key(fields, job_request), token).job
    shown = f"{job_id}#{_SECTIONS[kind]}" if kind in _SECTIONS else job.id
    return redirect(request, f"{PAGES}/jobs/{shown}")


for _kind in _FORMS:
    _path = "heal" if _kind == "healing" else WORKS[_kind].path
    router.add_api_route(f"{_JOB}/{_path}", _submits(_kind), methods=["POST"], name=WORKS[_kind].endpoint)


@router.get(f"{_JOB}/exports")
def show_exports(request: Request, job_id: JobId, context: ContextDep, owner: OwnerDep) -> Response:
    """Show what became of a job's exports to other formats."""
    job = job_view(jobs.get_job(context, owner, job_id))
    return render(request, "job_exports.html.j2", job=job, **export_section(context, owner, job_id))


@router.get(f"{_JOB}/pushes")
def show_pushes(request: Request, job_id: JobId, context: ContextDep, owner: OwnerDep) -> Response:
    """Show what became of a job's pushes to the Hub."""
    job = job_view(jobs.get_job(context, owner, job_id))
    return render(request, "job_push_list.html.j2", job=job, pushes=list_views(context, owner, job_id, "push"))


def list_views(context: Context, owner: str, job_id: str, kind: WorkKind) -> list[Any]:
    """Return the views of the latest work of a kind on a job's result, newest first."""
    return [work_view(work) for work in works.list_work(context, owner, job_id, kind)]


def export_section(context: Context, owner: str, job_id: str) -> dict[str, Any]:
    """Return what the page of a job shows of its exports to other formats.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    made = list_views(context, owner, job_id, "export")
    done = {job.export_to for job in made if not job.status.is_terminal or job.status == Status.SUCCEEDED}
    offers = [offer for offer in exports.list_offers(context, owner, job_id) if offer.kind not in done]
    return {"exports": made, "offers": offers, "form": secrets.token_urlsafe(16)}


def push_section(context: Context, actor: Actor, job_id: str) -> dict[str, Any]:
    """Return what the page of a job shows of its pushes.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    return {
        "pushes": list_views(context, actor.tenant, job_id, "push"),
        "pushable": works.list_made(context, actor.tenant, job_id),
        "needs_token": not _has_token(context, actor),
        "push_form": secrets.token_urlsafe(16),
    }


def _has_token(context: Context, actor: Actor) -> bool:
    try:
        choose_push_token(context.settings, actor, None)
    except UploadTokenError:
        return False
    return True
