"""`/ui/shared/{token}`: a finished job as people without a key see it, and the forms that create and end its link."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, ContextDep, JobId
from app.api.paths import PAGES, SHARED
from app.api.routes.artifacts import report_page, send_artifact
from app.api.routes.links import link_url
from app.api.serializers import job_view
from app.api.tenant_shares import Threads
from app.pages.downloads import send_export
from app.pages.forms import FORM, FieldsDep
from app.pages.jobs import find_report, job_page
from app.pages.rendering import redirect, render
from app.services import links, outputs
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import LinkNotFoundError
from app.shared.models import Job, Link
from rocket_core.report.figures import report_figures

router = APIRouter(include_in_schema=False)

_LINK = f"{PAGES}/jobs/{{job_id}}/link"
_SHARED = f"{SHARED}/{{token}}"


@router.post(_LINK)
def create_link(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep, fields: FieldsDep) -> Response:
    """Create the link of a job, and show its address; it cannot be shown again."""
    _, token = links.create_link(context, actor, job_id, with_files=bool(fields.get("with_files")))
    return job_page(request, context, actor, job_id, made_link=link_url(request, token))


@router.post(f"{_LINK}/end", dependencies=[FORM])
def end_link(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep) -> Response:
    """End the link of a job, and show the job."""
    links.end_link(context, actor, job_id)
    return redirect(request, f"{PAGES}/jobs/{job_id}#link")


@router.get(_SHARED)
def show_shared(request: Request, token: str, context: ContextDep) -> Response:
    """Show the job of a link: its own report, and its files if its owner allows it."""
    link, job = links.open_link(context, token)
    report = find_report(context, job.owner, job.id)
    return render(
        request,
        "shared.html.j2",
        job=job_view(job),
        report=report,
        figures=() if report is None else report_figures(report),
        files=outputs.list_artifacts(context, job.owner, job.id) if link.with_files else (),
        address=request.url.path,
    )


@router.get(f"{_SHARED}/report")
def show_shared_report(token: str, context: ContextDep) -> Response:
    """Return the report of a link's job as a self-contained page."""
    _, job = links.open_link(context, token)
    return report_page(outputs.get_report(context, job.owner, job.id))


@router.head(f"{_SHARED}/files/{{name:path}}")
@router.get(f"{_SHARED}/files/{{name:path}}")
def download_shared(request: Request, token: str, name: str, context: ContextDep) -> Response:
    """Return a file of a link's job."""
    link, job = _with_files(context, token)
    return send_artifact(request, context, job.owner, (job.id, name), _threads(request, link, job))


@router.get(f"{_SHARED}/download/{{export}}.tar")
def download_shared_export(request: Request, token: str, export: str, context: ContextDep) -> Response:
    """Return all files of an export of a link's job in one archive."""
    link, job = _with_files(context, token)
    return send_export(request, context, job.owner, (job.id, export), _threads(request, link, job))


def _with_files(context: Context, token: str) -> tuple[Link, Job]:
    link, job = links.open_link(context, token)
    if not link.with_files:
        raise LinkNotFoundError("this link shows the report alone; ask whoever sent it for one with the files")
    return link, job


def _threads(request: Request, link: Link, job: Job) -> Threads:
    """Return the threads of the job's tenant, of which visitors never occupy all."""
    visitor = Caller(tenant=job.owner, scopes=frozenset(), key_id=link.id)
    threads: Threads = request.app.state.downloads.of(visitor)
    return threads
