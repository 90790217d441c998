"""`/jobs/{id}/report` and `/jobs/{id}/artifacts`: results of a job."""

import base64
from email.utils import format_datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from app.api.dependencies import CallerDep, ContextDep, JobId, OwnerDep
from app.api.file_responses import StoredFileResponse, requested_ranges
from app.api.negotiation import check_preconditions, prefers_html
from app.api.problems import problems
from app.api.resources import ArtifactList
from app.api.serializers import artifact_view
from app.api.tenant_shares import Threads
from app.services import outputs
from app.services.context import Context
from app.shared.models import Artifact
from rocket_core.report.html import render_report
from rocket_core.report.schema import CompressionReport

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"])

_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; "
    "sandbox allow-scripts allow-downloads"
)
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.get(
    "/report",
    response_model=CompressionReport,
    responses=problems(404, 409)
    | {200: {"content": {"text/html": {"schema": {"type": "string"}}}, "description": "The report"}},
)
def get_report(
    job_id: JobId, request: Request, response: Response, context: ContextDep, owner: OwnerDep
) -> object | Response:
    """Return the report of a succeeded job: JSON, or a self-contained page for `Accept: text/html`.

    Layers of a mixture whose report has more than 12 MiB are summarised; the artifact `report.json` has all of them.
    """
    body = outputs.get_report(context, owner, job_id)
    if not prefers_html(request.headers.get("accept")):
        response.headers["Vary"] = "Accept"
        return body
    return report_page(body)


@router.get("/artifacts", responses=problems(404))
def list_artifacts(job_id: JobId, context: ContextDep, owner: OwnerDep) -> ArtifactList:
    """List the files of a succeeded job."""
    return ArtifactList(data=[artifact_view(artifact) for artifact in outputs.list_artifacts(context, owner, job_id)])


@router.head("/artifacts/{name:path}", include_in_schema=False)
@router.get(
    "/artifacts/{name:path}",
    response_class=Response,
    responses=problems(404, 410, 412, 416)
    | {
        200: {"content": _FILE, "description": "The file"},
        206: {"content": _FILE, "description": "The requested ranges of the file"},
        304: {"description": "The client already has this version"},
        307: {"description": "Redirect to the artifact store; the URL is valid for a few minutes"},
    },
)
def download_artifact(
    job_id: JobId,
    name: Annotated[str, Path(description="name of a file, as in the list of artifacts; may contain `/`")],
    request: Request,
    context: ContextDep,
    caller: CallerDep,
) -> Response:
    """Return a file, or ranges of it; the ETag is derived from its content and never changes."""
    threads = request.app.state.downloads.of(caller)
    return send_artifact(request, context, caller.tenant, (job_id, name), threads)


def report_page(body: object) -> Response:
    """Return a report as a self-contained page."""
    # The report contains names chosen by the model's author.
    headers = {"Vary": "Accept", "Content-Security-Policy": _REPORT_POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(render_report(CompressionReport.model_validate(body)), headers=headers)


def send_artifact(request: Request, context: Context, owner: str, file: tuple[str, str], threads: Threads) -> Response:
    """Return a file, or ranges of it.

    Args:
        request: the request to respond to.
        context: the service.
        owner: the tenant.
        file: the job, and the file's name.
        threads: threads that read the file.
    """
    download = outputs.open_artifact(context, owner, *file)
    artifact = download.artifact
    headers = _headers(artifact)
    if (known := check_preconditions(request.headers, headers)) is not None:
        return known
    # The store does not know our ETag: it would send a range of this file to be appended to the start of another.
    is_other = request.headers.get("if-range") not in {None, headers["ETag"], headers["Last-Modified"]}
    ranges = () if is_other else requested_ranges(request.headers.get("range"), artifact.size)
    if download.url is not None and request.method == "GET" and not is_other:
        return RedirectResponse(download.url, headers={"Cache-Control": "no-store"})
    return StoredFileResponse(
        download.read,
        artifact.size,
        ranges,
        headers=headers,
        media_type=artifact.media_type,
        threads=threads,
    )


def _headers(artifact: Artifact) -> dict[str, str]:
    digest = base64.b64encode(bytes.fromhex(artifact.sha256)).decode()
    filename = artifact.name.rsplit("/", 1)[-1]
    quoted = quote(filename, safe="")
    return {
        "ETag": f'"sha256-{artifact.sha256}"',
        "Repr-Digest": f"sha-256=:{digest}:",
        "Last-Modified": format_datetime(artifact.created_at, usegmt=True),
        "Cache-Control": "private, max-age=86400, immutable",
        "Content-Disposition": f"attachment; filename*=utf-8''{quoted}"
        if quoted != filename
        else f'attachment; filename="{filename}"',
        "X-Content-Type-Options": "nosniff",
    }
