"""`/models`: models that this server offers by name, and the upload of the caller's own."""

import re
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from app.api.dependencies import JSON_BODY, ActorDep, AdmissionDep, CallerDep, ContextDep, OwnerDep
from app.api.json_bodies import JsonRoute
from app.api.problems import problems
from app.api.resources import ModelList, ModelUploadView, NamedModelView, ReceivedFileView, UploadedFileView
from app.api.serializers import model_upload_view, named_model_view, received_file_view, uploaded_file_view
from app.api.uploaded_bodies import UploadReceiver
from app.services import models
from app.services.models import Range, parse_digest
from app.shared import catalog
from app.shared.errors import UploadedModelNotFoundError
from app.shared.resource_requests import ModelUploadRequest

PATH = "/models"
PIECE_PATH = re.compile(rf"(?:/ui)?{PATH}/[^/]+/files/.+")
"""Paths whose bodies are pieces of files, which are larger than other bodies."""

router = APIRouter(prefix=PATH, tags=["models"], route_class=JsonRoute)

_BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Bytes of the file.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
# What these match reaches the database, which rejects NUL characters.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
_FILE = re.compile(r"[A-Za-z0-9._/-]{1,200}")


def _model_name(model_name: Annotated[str, Path(description="name of an uploaded model, without `upload/`")]) -> str:
    if not _NAME.fullmatch(model_name):
        raise UploadedModelNotFoundError("you have uploaded no model with this name; GET /models lists them")
    return model_name


def _file_path(file: Annotated[str, Path(description="path of a file in the model's folder")]) -> str:
    if not _FILE.fullmatch(file):
        raise UploadedModelNotFoundError("no such file was announced for this model; GET /models/NAME lists its files")
    return file


ModelName = Annotated[str, Depends(_model_name)]
FilePath = Annotated[str, Depends(_file_path)]


@router.get("", responses=problems())
def list_models(context: ContextDep, owner: OwnerDep) -> ModelList:
    """List the models of this server and the caller's uploads by `model_id`; Hub models can be used as well."""
    offered = [NamedModelView(id=found.id, problem=found.problem) for found in catalog.find_models(context.settings)]
    return ModelList(data=[*offered, *map(named_model_view, models.list_models(context, owner))])


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    dependencies=[JSON_BODY],
    responses=problems(400, 409, 413, 415, 422, 429, 507)
    | {200: {"model": ModelUploadView, "description": "The same files were already announced; the upload continues"}},
)
def announce_model(
    body: ModelUploadRequest, response: Response, context: ContextDep, actor: ActorDep
) -> ModelUploadView:
    """Announce a model to upload, by the paths and sizes of its files; jobs use it as `upload/NAME`."""
    upload, is_new = models.create_model(context, actor, body)
    if not is_new:
        response.status_code = status.HTTP_200_OK
    response.headers["Location"] = f"{PATH}/{body.name}"
    return model_upload_view(upload, context.settings)


@router.get("/{model_name}", responses=problems(404))
def get_model(model_name: ModelName, context: ContextDep, owner: OwnerDep) -> ModelUploadView:
    """Return an uploaded model, and how much of each file has arrived."""
    return model_upload_view(models.get_model(context, owner, model_name), context.settings)


@router.get("/{model_name}/files/{file:path}", responses=problems(404))
def get_file(model_name: ModelName, file: FilePath, context: ContextDep, owner: OwnerDep) -> UploadedFileView:
    """Return a file of an uploaded model, with the hashes of what has arrived of it, to continue the upload."""
    return uploaded_file_view(*models.get_file(context, owner, model_name, file))


@router.put("/{model_name}/files/{file:path}", openapi_extra=_BYTES, responses=problems(404, 409, 413, 422, 429, 507))
async def save_piece(
    request: Request,
    model_name: ModelName,
    file: FilePath,
    context: ContextDep,
    caller: CallerDep,
    actor: ActorDep,
    content_range: Annotated[str, Header(description="`bytes FIRST-LAST/SIZE`: which bytes of the file these are.")],
    content_digest: Annotated[
        str | None, Header(description="`sha-256=:BASE64:` of the body (RFC 9530); checked if sent.")
    ] = None,
) -> ReceivedFileView:
    """Append bytes to a file of a model. Sent again, the same bytes change nothing.

    Until the model is judged, no more than the header of a safetensors file is accepted: its first 8 bytes, and as many
    as they say.
    """
    span, digest = Range.parse(content_range), parse_digest(content_digest)
    receiver: UploadReceiver = request.app.state.upload_receiver
    await run_in_threadpool(models.expect_piece, context, actor.tenant, model_name, file, span)
    async with receiver.receive(request, caller) as (pieces, threads):
        save = partial(models.save_piece, context, actor, model_name, file, span, chunks=pieces, digest=digest)
        saved = await threads.run(save)
    return received_file_view(saved)


@router.post("/{model_name}/check", responses=problems(404, 409, 422))
async def check_headers(
    model_name: ModelName, context: ContextDep, actor: ActorDep, threads: AdmissionDep
) -> ModelUploadView:
    """Judge a model by its small files and headers, so that its weights may follow; if refused, it is deleted."""
    upload = await threads.run(models.check_headers, context, actor, model_name)
    return model_upload_view(upload, context.settings)


@router.delete("/{model_name}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404, 409))
def delete_model(model_name: ModelName, context: ContextDep, actor: ActorDep) -> None:
    """Delete an uploaded model, complete or not, unless an unfinished job uses it."""
    models.delete_model(context, actor, model_name)
