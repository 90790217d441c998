"""`/calibrations`: text to calibrate on, the server's and the caller's own."""

import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated, Any

import anyio
import anyio.from_thread
import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Request, Response, status
from starlette.exceptions import HTTPException

from app.api.content_types import read_media_type
from app.api.dependencies import ContextDep, OwnerDep
from app.api.errors import problems
from app.api.resources import CalibrationList, CalibrationView
from app.api.views import upload_view
from app.services import uploads
from app.shared import catalog
from app.shared.errors import UploadNotFoundError

PATH = "/calibrations"
UPLOAD_THREADS = 8
"""Uploads received at once; a slow client must not keep threads from the others."""

router = APIRouter(prefix=PATH, tags=["calibrations"])

_SUFFIXES = {"text/plain": ".txt", "application/jsonl": ".jsonl", "application/x-ndjson": ".jsonl"}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": 'A text, or an object with a string `text` on each line: `{"text": "..."}`.',
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _SUFFIXES},
    }
}
_ID = re.compile(r"[0-9a-f]{32}")
_SILENCE_SECONDS = 30.0


def _upload_id(upload_id: Annotated[str, Path(description="id of an upload, without `upload/`")]) -> str:
    if not _ID.fullmatch(upload_id):
        raise UploadNotFoundError("you have uploaded no file of this id; GET /calibrations lists yours")
    return upload_id


def _suffix(request: Request) -> str:
    sent = read_media_type(request)
    if sent not in _SUFFIXES:
        kinds = ", ".join(f"`{kind}`" for kind in _SUFFIXES)
        raise HTTPException(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, f"send the file as one of {kinds}")
    return _SUFFIXES[sent]


UploadId = Annotated[str, Depends(_upload_id)]


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=_BODY,
    responses=problems(413, 415, 422, 429, 507)
    | {200: {"model": CalibrationView, "description": "The same content was there already"}},
)
async def save_upload(
    request: Request,
    response: Response,
    context: ContextDep,
    owner: OwnerDep,
    suffix: Annotated[str, Depends(_suffix)],
) -> CalibrationView:
    """Keeps the body as a calibration file, to be used as `upload/ID`; the same content has the same id."""
    save = partial(uploads.save_upload, context, owner, suffix, _chunks(request.stream()))
    upload, is_new = await anyio.to_thread.run_sync(save, limiter=request.app.state.upload_threads)
    if not is_new:
        response.status_code = status.HTTP_200_OK
    response.headers["Location"] = f"{PATH}/{upload.id}"
    return upload_view(upload)


@router.get("", responses=problems())
def list_calibrations(context: ContextDep, owner: OwnerDep) -> CalibrationList:
    """Calibration datasets, as `calibration.dataset` takes them: the server's, then the caller's uploads."""
    offered = [CalibrationView(id=name) for name in catalog.list_calibrations(context.settings)]
    return CalibrationList(data=[*offered, *map(upload_view, uploads.list_uploads(context, owner))])


@router.get("/{upload_id}", responses=problems(404))
def get_upload(upload_id: UploadId, context: ContextDep, owner: OwnerDep) -> CalibrationView:
    """One upload."""
    return upload_view(uploads.get_upload(context, owner, upload_id))


@router.delete("/{upload_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404, 409))
def delete_upload(upload_id: UploadId, context: ContextDep, owner: OwnerDep) -> None:
    """Deletes an upload that no job needs any more."""
    uploads.delete_upload(context, owner, upload_id)


def _chunks(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """The body, for a thread that reads it while the event loop receives it."""
    while True:
        chunk = anyio.from_thread.run(_next_chunk, stream)
        if chunk is None:
            return
        yield chunk


async def _next_chunk(stream: AsyncIterator[bytes]) -> bytes | None:
    try:
        with anyio.fail_after(_SILENCE_SECONDS):
            return await anext(stream, None)
    except TimeoutError:
        raise HTTPException(status.HTTP_408_REQUEST_TIMEOUT) from None
