"""`/jobs/{id}/report` and `/jobs/{id}/artifacts`: what a job has produced."""

import base64
import re

from fastapi import APIRouter, Request, Response, status
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from app.api.conditions import is_known
from app.api.dependencies import ContextDep, JobId, OwnerDep
from app.api.errors import problems
from app.api.views import ArtifactList, artifact_view
from app.services import outputs
from app.shared.models import Artifact
from rocket_core.report import CompressionReport

router = APIRouter(prefix="/jobs/{job_id}", tags=["results"])

_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_RANGES = re.compile(r"bytes=\s*(\d+-\d*|-\d+)(\s*,\s*(\d+-\d*|-\d+)){0,7}\s*")


@router.get("/report", response_model=CompressionReport, responses=problems(404, 409))
def get_report(job_id: JobId, context: ContextDep, owner: OwnerDep) -> object:
    """The allocation report of a job that has succeeded."""
    return outputs.get_report(context, owner, job_id)


@router.get("/artifacts", responses=problems(404))
def list_artifacts(job_id: JobId, context: ContextDep, owner: OwnerDep) -> ArtifactList:
    """The files of a job that has succeeded."""
    return ArtifactList(data=[artifact_view(artifact) for artifact in outputs.list_artifacts(context, owner, job_id)])


@router.head("/artifacts/{name:path}", include_in_schema=False)
@router.get(
    "/artifacts/{name:path}",
    response_class=FileResponse,
    responses=problems(404, 410, 416)
    | {
        200: {"content": _FILE, "description": "The file"},
        206: {"content": _FILE, "description": "Ranges of it"},
        304: {"description": "The client has it already"},
    },
)
def download_artifact(job_id: JobId, name: str, request: Request, context: ContextDep, owner: OwnerDep) -> Response:
    """One file, or ranges of it; the ETag is that of its content and never changes."""
    download = outputs.open_artifact(context, owner, job_id, name)
    artifact = download.artifact
    headers = _headers(artifact)
    if is_known(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    _settle_range(request, artifact.size, headers["ETag"])
    filename = artifact.name.rsplit("/", 1)[-1]
    return FileResponse(download.path, headers=headers, media_type=artifact.media_type, filename=filename)


def _headers(artifact: Artifact) -> dict[str, str]:
    digest = base64.b64encode(bytes.fromhex(artifact.sha256)).decode()
    return {
        "ETag": f'"sha256-{artifact.sha256}"',
        "Repr-Digest": f"sha-256=:{digest}:",
        "Cache-Control": "private, max-age=86400, immutable",
        "X-Content-Type-Options": "nosniff",
    }


def _settle_range(request: Request, size: int, etag: str) -> None:
    """Drops a range that means nothing, and refuses one that lies beyond the file, as RFC 9110 has it."""
    asked = request.headers.get("range")
    if asked is None or request.headers.get("if-range", etag) != etag:
        return
    if not _RANGES.fullmatch(asked) or not _runs_forward(asked):
        kept = [(name, value) for name, value in request.scope["headers"] if name.lower() != b"range"]
        request.scope["headers"] = kept
    elif not any(_is_within(part.strip(), size) for part in asked.partition("=")[2].split(",")):
        raise HTTPException(
            status.HTTP_416_RANGE_NOT_SATISFIABLE,
            f"the range lies beyond the file's {size} bytes",
            headers={"Content-Range": f"bytes */{size}"},
        )


def _runs_forward(asked: str) -> bool:
    bounds = [part.strip().partition("-") for part in asked.partition("=")[2].split(",")]
    return all(not first or not last or int(first) <= int(last) for first, _, last in bounds)


def _is_within(part: str, size: int) -> bool:
    first, _, last = part.partition("-")
    return int(first) < size if first else int(last) > 0 and size > 0
