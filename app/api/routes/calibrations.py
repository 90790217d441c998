"""`/calibrations`: calibration datasets, the server's and the caller's own."""

import re
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response, status
from starlette.exceptions import HTTPException

from app.api.content_types import read_media_type
from app.api.dependencies import ActorDep, CallerDep, ContextDep, OwnerDep
from app.api.problems import problems
from app.api.resources import CalibrationList, CalibrationView
from app.api.serializers import upload_view
from app.api.uploaded_bodies import UploadReceiver
from app.services import uploads
from app.shared import catalog
from app.shared.errors import InvalidRequestError, UploadNotFoundError

PATH = "/calibrations"
BODY_PATH = re.compile(rf"(?:/ui)?{PATH}")
"""Paths whose bodies are files, which are larger than other bodies."""

router = APIRouter(prefix=PATH, tags=["calibrations"])

_SUFFIXES = {"text/plain": ".txt", "application/jsonl": ".jsonl", "application/x-ndjson": ".jsonl"}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": 'A text, or an object with a string `text` or a chat on each line: `{"text": "..."}`, '
        '`{"messages": [...]}`.',
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _SUFFIXES},
    }
}
_ID = re.compile(r"[0-9a-f]{32}")


def _upload_id(upload_id: Annotated[str, Path(description="id of an upload, without `upload/`")]) -> str:
    if not _ID.fullmatch(upload_id):
        raise UploadNotFoundError("no uploaded file has this id; GET /calibrations lists yours")
    return upload_id


def _suffix(request: Request) -> str:
    sent = read_media_type(request)
    if sent not in _SUFFIXES:
        kinds = ", ".join(f"`{kind}`" for kind in _SUFFIXES)
        raise HTTPException(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, f"send the file as one of {kinds}")
    return _SUFFIXES[sent]


def _file_name(
    name: Annotated[str | None, Query(min_length=1, max_length=255, description="name of the file, to show it")] = None,
) -> str | None:
    # Shown in lists, and in terminals.
    if name is not None and not name.isprintable():
        raise InvalidRequestError("a name is printable text", param="name")
    return name


UploadId = Annotated[str, Depends(_upload_id)]


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=_BODY,
    responses=problems(413, 415, 422, 429, 507)
    | {200: {"model": CalibrationView, "description": "The same content was already uploaded"}},
)
async def save_upload(
    request: Request,
    response: Response,
    context: ContextDep,
    caller: CallerDep,
    actor: ActorDep,
    suffix: Annotated[str, Depends(_suffix)],
    name: Annotated[str | None, Depends(_file_name)] = None,
) -> CalibrationView:
    """Store the body as a calibration file, for use as `upload/ID`; the same content has the same id and name."""
    upload_receiver: UploadReceiver = request.app.state.upload_receiver
    async with upload_receiver.receive(request, caller) as (pieces, threads):
        save = partial(uploads.save_upload, context, actor, suffix, pieces, name=name)
        upload, is_new = await threads.run(save)
    if not is_new:
        response.status_code = status.HTTP_200_OK
    response.headers["Location"] = f"{PATH}/{upload.id}"
    return upload_view(upload)


@router.get("", responses=problems())
def list_calibrations(context: ContextDep, owner: OwnerDep) -> CalibrationList:
    """List the values that `calibration.dataset` accepts: the server's datasets, then the caller's uploads."""
    offered = [CalibrationView(id=name) for name in catalog.list_calibrations(context.settings)]
    return CalibrationList(data=[*offered, *map(upload_view, uploads.list_uploads(context, owner))])


@router.get("/{upload_id}", responses=problems(404))
def get_upload(upload_id: UploadId, context: ContextDep, owner: OwnerDep) -> CalibrationView:
    """Return an upload."""
    return upload_view(uploads.get_upload(context, owner, upload_id))


@router.delete("/{upload_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404, 409))
def delete_upload(upload_id: UploadId, context: ContextDep, actor: ActorDep) -> None:
    """Delete an upload, unless an unfinished job uses it."""
    uploads.delete_upload(context, actor, upload_id)
