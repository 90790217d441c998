"""`/ui/jobs/{id}/download`: an export of a job as one archive."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from app.api.dependencies import CallerDep, ContextDep, JobId
from app.api.file_responses import StoredFileResponse, requested_ranges
from app.api.negotiation import check_preconditions
from app.api.paths import PAGES
from app.api.serializers import job_view
from app.api.tenant_shares import Threads
from app.services import jobs, outputs
from app.services.archives import TarArchive
from app.services.context import Context
from rocket_core.engines import current_name

router = APIRouter(include_in_schema=False)


@router.get(f"{PAGES}/jobs/{{job_id}}/download/{{export}}.tar")
def download_export(
    request: Request,
    job_id: JobId,
    export: Annotated[str, Path(pattern=r"^[a-z-]{1,32}$")],
    context: ContextDep,
    caller: CallerDep,
) -> Response:
    """Return all files of an export in one archive, or ranges of it, so that a download can be resumed."""
    return send_export(request, context, caller.tenant, (job_id, export), request.app.state.downloads.of(caller))


def send_export(request: Request, context: Context, owner: str, wanted: tuple[str, str], threads: Threads) -> Response:
    """Return all files of an export in one archive, or ranges of it.

    Args:
        request: the request to respond to.
        context: the service.
        owner: the tenant.
        wanted: the job, and the export's name.
        threads: threads that read the files.

    Raises:
        HTTPException: 404, the job has no such export.
    """
    job_id, export = wanted
    names = [file.name for file in outputs.list_artifacts(context, owner, job_id)]
    folder = current_name(export)
    inside = [name for name in names if name.startswith(f"{folder}/")]
    if not inside:
        raise HTTPException(404)
    model = job_view(jobs.get_job(context, owner, job_id)).model_id.rpartition("/")[2]
    files = [outputs.open_artifact(context, owner, job_id, name) for name in inside]
    archive = TarArchive(files, model)
    entity = f'"sha256-{archive.sha256}"'
    headers = {
        "ETag": entity,
        "Cache-Control": "private, no-store",
        "Content-Disposition": f'attachment; filename="{model}-{export}.tar"',
        "X-Content-Type-Options": "nosniff",
    }
    if (known := check_preconditions(request.headers, headers)) is not None:
        return known
    is_other = request.headers.get("if-range") not in {None, entity}
    return StoredFileResponse(
        archive.read,
        archive.size,
        () if is_other else requested_ranges(request.headers.get("range"), archive.size),
        headers=headers,
        media_type="application/x-tar",
        threads=threads,
    )
