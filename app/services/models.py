"""Models of tenants: announced, judged by their headers, and received in pieces."""

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from sqlalchemy.orm import Session

from app.services import quotas
from app.services.context import Context
from app.shared.errors import (
    InvalidRequestError,
    ModelConflictError,
    OverQuotaError,
    QuotaExceededError,
)
from app.shared.models import ModelFile, ModelPiece, UploadedModel
from app.shared.repositories import audit, models, tenants
from app.shared.repositories.audit import Action, Actor
from app.shared.repositories.removed import Removed
from app.shared.requests import UPLOAD, JobRequest
from app.shared.resource_requests import ModelUploadRequest
from rocket_core.errors import RocketError
from rocket_core.inspection.files.model_parts import check_part, check_parts, is_weights
from rocket_core.inspection.files.safetensors_headers import PREFIX_BYTES, header_length

_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Consecutive bytes of a file.

    Attributes:
        start: offset of the first byte.
        stop: offset after the last byte.
        total: size of the whole file.
    """

    start: int
    stop: int
    total: int

    @classmethod
    def parse(cls, header: str | None) -> "Range":
        """Return the range of a `Content-Range` header.

        Raises:
            InvalidRequestError: the header is missing or not valid.
        """
        match = _RANGE.fullmatch(header or "")
        if match is None:
            raise InvalidRequestError(
                "say which bytes of the file these are: `Content-Range: bytes FIRST-LAST/SIZE`", param="Content-Range"
            )
        first, last, total = map(int, match.groups())
        if not first <= last < total:
            raise InvalidRequestError("a range begins before it ends, within the file", param="Content-Range")
        return cls(start=first, stop=last + 1, total=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadState:
    """A model, and what has arrived of it.

    Attributes:
        model: the model.
        files: its files, by path.
    """

    model: UploadedModel
    files: Sequence[ModelFile]


def parse_digest(header: str | None) -> str | None:
    """Return the SHA-256 of a `Content-Digest` header, hexadecimal; None if it is missing.

    Raises:
        InvalidRequestError: the header is not valid.
    """
    if header is None:
        return None
    match = _DIGEST.fullmatch(header.strip())
    if match is None:
        raise InvalidRequestError("write it as `sha-256=:BASE64:` (RFC 9530)", param="Content-Digest")
    return base64.b64decode(match[1]).hex()


def create_model(context: Context, actor: Actor, request: ModelUploadRequest) -> tuple[UploadState, bool]:
    """Announce a model to upload, or return the tenant's earlier announcement of the same files.

    Returns:
        The model, and whether it is new.

    Raises:
        RocketError: the files cannot be a model that is compressed.
        ModelConflictError: the tenant has another model with this name.
        OverQuotaError: the model is larger than the tenant's models may be.
        QuotaExceededError: the tenant has as many models, or stores as many bytes, as allowed.
    """
    files = {file.path: file.size for file in request.files}
    for path, size in files.items():
        check_part(path, size)
    check_parts(files)
    heads = {path: size for path, size in files.items() if not is_weights(path) or size == 0}
    with context.database.transaction() as session:
        tenants.lock_tenant(session, actor.tenant)
        if not models.has_model(session, actor.tenant, request.name):
            _check_room(context, session, actor.tenant, files)
        model, is_new = models.create_model(session, actor.tenant, request.name, files, heads)
        if is_new:
            audit.record(session, actor, Action.MODEL_CREATE, subject=model.id, detail={"size": model.size})
        return _state(session, model), is_new


def _check_room(context: Context, session: Session, owner: str, files: dict[str, int]) -> None:
    limits = quotas.find_limits(session, context.settings, owner)
    weights = sum(size for path, size in files.items() if is_weights(path))
    if limits.model_bytes is not None and weights > limits.model_bytes:
        raise OverQuotaError(f"the model has {weights} bytes of weights; at most {limits.model_bytes} are allowed")
    quotas.check_room(session, limits, owner, size=sum(files.values()))
    most = context.settings.max_models
    if models.count_models(session, owner) >= most:
        raise QuotaExceededError(f"a tenant may have at most {most} uploaded models; delete one first")


def get_model(context: Context, owner: str, name: str) -> UploadState:
    """Return a model of a tenant.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
    """
    with context.database.snapshot() as session:
        return _state(session, models.get_model(session, owner, name))


def get_file(context: Context, owner: str, name: str, path: str) -> tuple[ModelFile, Sequence[ModelPiece]]:
    """Return a file of a tenant's model, and the pieces of it that have arrived, in order.

    Raises:
        UploadedModelNotFoundError: the tenant has announced no such model or file.
    """
    with context.database.snapshot() as session:
        file = models.get_file(session, models.get_model(session, owner, name), path)
        return file, models.list_pieces(session, file)


def list_models(context: Context, owner: str) -> Sequence[UploadedModel]:
    """Return all models that a tenant has uploaded, or is uploading, by name."""
    with context.database.snapshot() as session:
        return models.list_models(session, owner)


def expect_piece(context: Context, owner: str, name: str, path: str, span: Range) -> None:
    """Refuse bytes that cannot be appended to a file, before they arrive.

    Raises:
        UploadedModelNotFoundError: the tenant has announced no such model or file.
        InvalidRequestError: the file has another size, or the piece is too large or too small.
        ModelConflictError: the file continues elsewhere, or its model is not judged yet.
    """
    with context.database.snapshot() as session:
        model = models.get_model(session, owner, name)
        _find_target(context, session, model, path, span)


def save_piece(
    context: Context, actor: Actor, name: str, path: str, span: Range, *, chunks: Iterable[bytes], digest: str | None
) -> ModelFile:
    """Append bytes to a file of a model; sent again, the same bytes change nothing.

    Args:
        context: the service.
        actor: who uploads it.
        name: the model.
        path: the file.
        span: which bytes they are.
        chunks: the bytes.
        digest: their SHA-256 as the client knows it, hexadecimal; None if it does not say.

    Raises:
        UploadedModelNotFoundError: the tenant has announced no such model or file.
        InvalidRequestError: these are other bytes than announced, or too few or too many.
        ModelConflictError: the file continues elsewhere, or its model is not judged yet.
        RocketError: the bytes are not the start of a safetensors file.
        StorageError: they cannot be stored.
    """
    start, chunks = _peek(chunks)
    head = _head(path, span, start)
    stored = context.artifacts.put_stream(chunks, max_bytes=span.stop - span.start)
    is_kept = False
    try:
        if stored.size != span.stop - span.start:
            raise InvalidRequestError(f"{span.stop - span.start} bytes were announced, and {stored.size} arrived")
        if digest is not None and digest != stored.sha256:
            raise InvalidRequestError("the bytes do not have the announced hash; send them again")
        with context.database.transaction() as session:
            model = models.lock_model(session, actor.tenant, name)
            file = _find_target(context, session, model, path, span, head=head)
            earlier = models.find_piece(session, file, span.start, stored.size)
            if earlier is not None:
                if earlier.sha256 != stored.sha256:
                    raise ModelConflictError("other bytes have arrived here before; delete the model and start again")
                return file
            piece = ModelPiece(
                model_id=model.id,
                path=path,
                start=span.start,
                size=stored.size,
                storage_key=stored.key,
                sha256=stored.sha256,
            )
            file = models.save_piece(session, model, piece, head=head)
            if model.phase == "ready":
                audit.record(session, actor, Action.MODEL_COMPLETE, subject=model.id, detail={"size": model.size})
        is_kept = True
        return file
    finally:
        if not is_kept:
            context.remove(Removed(storage_keys=(stored.key,)))


def check_headers(context: Context, actor: Actor, name: str) -> UploadState:
    """Judge a model by its headers, so that its weights may follow; a model that is refused is deleted.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
        ModelConflictError: its headers have not arrived.
        OverQuotaError: the model is too large.
        RocketError: no job could compress it; the code is that which the job would have failed with.
    """
    with context.database.snapshot() as session:
        model = models.get_model(session, actor.tenant, name)
        limits = quotas.find_limits(session, context.settings, actor.tenant)
    if model.phase == "headers":
        folder = context.headers.fetch(model)
        try:
            request = JobRequest(model_id=UPLOAD + name)
            figures = context.admission.inspect(actor.tenant, request, limits, folder)
        except (RocketError, OverQuotaError) as error:
            _refuse(context, actor, model, error.code)
            raise
        with context.database.transaction() as session:
            judged = models.lock_model(session, actor.tenant, name)
            if judged.id != model.id:
                raise ModelConflictError("the model was deleted and announced again meanwhile; judge it again")
            models.accept_headers(session, judged, parameters=min(figures.parameters, 2**63 - 1))
    return get_model(context, actor.tenant, name)


def delete_model(context: Context, actor: Actor, name: str) -> None:
    """Delete a model of a tenant, complete or not.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
        ConflictError: an unfinished job needs it.
    """
    with context.database.transaction() as session:
        subject = models.get_model(session, actor.tenant, name).id
        removed = models.delete_model(session, actor.tenant, name)
        audit.record(session, actor, Action.MODEL_DELETE, subject=subject)
    context.remove(removed)


def _refuse(context: Context, actor: Actor, model: UploadedModel, code: str) -> None:
    with context.database.transaction() as session:
        if models.get_model(session, actor.tenant, model.name).id != model.id:
            return
        removed = models.delete_model(session, actor.tenant, model.name)
        audit.record(session, actor, Action.MODEL_REFUSE, subject=model.id, outcome="failure", detail={"code": code})
    context.remove(removed)


def _find_target(
    context: Context, session: Session, model: UploadedModel, path: str, span: Range, *, head: int | None = None
) -> ModelFile:
    """Return the file that bytes are to be appended to, or that has them already."""
    file = models.get_file(session, model, path)
    size, most = span.stop - span.start, context.settings.max_upload_bytes
    if span.total != file.size:
        raise InvalidRequestError(f"{path} was announced with {file.size} bytes", param="Content-Range")
    if size > most:
        raise InvalidRequestError(f"a piece may have at most {most} bytes; send smaller ones", param="Content-Range")
    if models.find_piece(session, file, span.start, size) is not None:
        return file
    if file.received != span.start:
        raise ModelConflictError(f"{path} continues at byte {file.received}; GET /models/NAME says what has arrived")
    known = file.head if file.head is not None else head
    if model.phase == "headers" and known is not None and span.stop > known:
        raise ModelConflictError(
            f"the first {known} bytes of {path} are its header; send no more before the model is judged "
            "(POST /models/NAME/check)"
        )
    least = min(models.MIN_PIECE_BYTES, most)
    # Before the first bytes are here, nothing says where the header ends.
    if size < least and known is not None and span.stop not in {known, file.size}:
        raise InvalidRequestError(
            f"a piece has at least {least} bytes, except the last one of a file or its header; send more at once",
            param="Content-Range",
        )
    return file


def _head(path: str, span: Range, start: bytes) -> int | None:
    """Return how many bytes the header of a safetensors file takes, with the number before it; None if not seen."""
    if not is_weights(path) or span.start > 0:
        return None
    return PREFIX_BYTES + header_length(start[:PREFIX_BYTES], span.total, path)


def _peek(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first bytes of a stream, at least 8 if it has that many, and the whole stream."""
    pieces = iter(chunks)
    start = b""
    while len(start) < PREFIX_BYTES and (chunk := next(pieces, None)) is not None:
        start += chunk
    return start, chain([start], pieces)


def _state(session: Session, model: UploadedModel) -> UploadState:
    return UploadState(model=model, files=models.list_files(session, model.id))
