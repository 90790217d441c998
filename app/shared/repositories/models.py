"""Models that tenants upload in pieces; jobs refer to them as `upload/NAME`."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sqlalchemy import Select, and_, delete, func, or_, select
from sqlalchemy.orm import Session

from app.shared.database import now
from app.shared.errors import (
    ConflictError,
    InvalidRequestError,
    ModelConflictError,
    ModelNotReadyError,
    UploadedModelNotFoundError,
)
from app.shared.lifecycle import Status
from app.shared.models import Job, ModelFile, ModelPiece, UploadedModel
from app.shared.repositories.identifiers import new_id
from app.shared.repositories.removed import Removed
from app.shared.requests import UPLOAD

PREFIX = "model"
MIN_PIECE_BYTES = 2**16
"""Least bytes of a piece; only the last one of a file, or of a header, may have fewer."""
MAX_PIECES = 10_000
"""Most pieces of one file."""
MAX_MODEL_PIECES = 200_000
"""Most pieces of one model."""

_BATCH = 100


def create_model(
    session: Session, owner: str, name: str, files: Mapping[str, int], heads: Mapping[str, int]
) -> tuple[UploadedModel, bool]:
    """Announce a model, or return the tenant's earlier announcement of the same files.

    Args:
        session: a writing transaction that has locked the tenant.
        owner: the tenant.
        name: the model's name.
        files: sizes by path.
        heads: for files of which it is known, how many of the first bytes are needed to judge the model.

    Returns:
        The model, and whether it is new.

    Raises:
        ModelConflictError: the tenant has another model with this name.
    """
    earlier = session.scalars(_mine(owner, name)).one_or_none()
    if earlier is not None:
        if {file.path: file.size for file in list_files(session, earlier.id)} != dict(files):
            raise ModelConflictError(
                f"you have uploaded other files as {UPLOAD}{name}; delete that model first, or choose another name"
            )
        return earlier, False
    at = now(session)
    model = UploadedModel(
        id=new_id(PREFIX, at),
        owner=owner,
        name=name,
        phase="headers",
        size=sum(files.values()),
        skeleton_key=secrets.token_hex(16),
        created_at=at,
        used_at=at,
    )
    session.add(model)
    session.flush()
    session.add_all(
        ModelFile(model_id=model.id, path=path, size=size, head=heads.get(path)) for path, size in files.items()
    )
    session.flush()
    return model, True


def has_model(session: Session, owner: str, name: str) -> bool:
    """Return whether a tenant has a model with that name."""
    return session.scalars(_mine(owner, name)).one_or_none() is not None


def get_model(session: Session, owner: str, name: str) -> UploadedModel:
    """Return a model of a tenant, whether it is complete or not.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
    """
    return _only(session.scalars(_mine(owner, name)).one_or_none())


def lock_model(session: Session, owner: str, name: str) -> UploadedModel:
    """Return a model like `get_model`; no other transaction changes it before this one ends."""
    statement = _mine(owner, name).with_for_update().execution_options(populate_existing=True)
    return _only(session.scalars(statement).one_or_none())


def list_models(session: Session, owner: str) -> list[UploadedModel]:
    """Return all models of a tenant, by name."""
    return list(session.scalars(select(UploadedModel).where(UploadedModel.owner == owner).order_by(UploadedModel.name)))


def count_models(session: Session, owner: str) -> int:
    """Return the number of a tenant's models."""
    mine = select(func.count()).select_from(UploadedModel).where(UploadedModel.owner == owner)
    return session.execute(mine).scalar_one()


def list_files(session: Session, model_id: str) -> list[ModelFile]:
    """Return the files of a model, by path."""
    statement = select(ModelFile).where(ModelFile.model_id == model_id).order_by(ModelFile.path)
    return list(session.scalars(statement.execution_options(populate_existing=True)))


def get_file(session: Session, model: UploadedModel, path: str) -> ModelFile:
    """Return a file of a model.

    Raises:
        UploadedModelNotFoundError: no file of the model has this path.
    """
    file = session.get(ModelFile, (model.id, path), populate_existing=True)
    if file is None:
        raise UploadedModelNotFoundError("no such file was announced for this model; GET /models/NAME lists its files")
    return file


def list_pieces(session: Session, file: ModelFile) -> list[ModelPiece]:
    """Return the pieces of a file, in order."""
    mine = (ModelPiece.model_id == file.model_id, ModelPiece.path == file.path)
    return list(session.scalars(select(ModelPiece).where(*mine).order_by(ModelPiece.start)))


def find_piece(session: Session, file: ModelFile, start: int, size: int) -> ModelPiece | None:
    """Return the piece that consists of exactly these bytes, if it has arrived."""
    piece = session.get(ModelPiece, (file.model_id, file.path, start))
    return piece if piece is not None and piece.size == size else None


def save_piece(session: Session, model: UploadedModel, piece: ModelPiece, *, head: int | None) -> ModelFile:
    """Append stored bytes to a file of a locked model; the last one makes the model ready.

    Args:
        session: a writing transaction.
        model: the model.
        piece: the bytes.
        head: number of the file's first bytes that are needed to judge the model, if these bytes show it.

    Returns:
        The file.

    Raises:
        ModelConflictError: other bytes have arrived in the meantime.
        InvalidRequestError: the file or the model consists of too many pieces.
    """
    file = get_file(session, model, piece.path)
    if file.received != piece.start:
        raise ModelConflictError(f"{piece.path} continues at byte {file.received}")
    of_file, of_model = _count_pieces(session, file)
    if of_file >= MAX_PIECES or of_model >= MAX_MODEL_PIECES:
        raise InvalidRequestError(
            f"{piece.path} consists of {of_file} pieces already, and the model of {of_model}; a file may have "
            f"{MAX_PIECES}, and a model {MAX_MODEL_PIECES}: delete the model and send larger pieces"
        )
    session.add(piece)
    file.received += piece.size
    if file.head is None:
        file.head = head
    model.used_at = now(session)
    session.flush()
    _note_completion(session, model)
    return file


def accept_headers(session: Session, model: UploadedModel, *, parameters: int) -> None:
    """Record that the headers of a locked model were judged, so that its weights may follow."""
    if model.phase == "headers":
        model.phase, model.parameters = "weights", parameters
        session.flush()
        _note_completion(session, model)


def check_model(session: Session, owner: str, name: str) -> None:
    """Raise an error unless a model is complete, and lock it while this transaction creates a job that needs it.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
        ModelNotReadyError: parts of it have not arrived.
    """
    model = lock_model(session, owner, name)
    require_ready(session, model)
    model.used_at = now(session)
    session.flush()


def require_ready(session: Session, model: UploadedModel) -> None:
    """Raise an error unless a model is complete.

    Raises:
        ModelNotReadyError: parts of it have not arrived.
    """
    if model.phase != "ready":
        arrived = sum(file.received for file in list_files(session, model.id))
        raise ModelNotReadyError(
            f"{arrived} of the {model.size} bytes of {UPLOAD}{model.name} have arrived; continue the upload: "
            "`rocket upload` with the same folder sends the rest"
        )


def delete_model(session: Session, owner: str, name: str) -> Removed:
    """Delete the rows of a model.

    Returns:
        Its files, to be removed once the transaction is committed.

    Raises:
        UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
        ConflictError: an unfinished job needs it.
    """
    model = lock_model(session, owner, name)
    if _is_needed(session, model):
        raise ConflictError("an unfinished job uses this model; cancel the job, or wait until it finishes")
    return _delete(session, model)


def delete_old(
    session: Session, *, unfinished: timedelta, retention: timedelta | None, limit: int = _BATCH
) -> list[Removed]:
    """Delete abandoned uploads, and models that no job has used for the retention time.

    Args:
        session: a writing transaction.
        unfinished: time without a new piece after which an incomplete model is deleted.
        retention: time without a new job after which a complete one is; None for never.
        limit: most models to delete.

    Returns:
        Their files, to be removed once the transaction is committed; empty once no models are left.
    """
    at = now(session)
    is_old = and_(UploadedModel.phase != "ready", UploadedModel.used_at <= at - unfinished)
    if retention is not None:
        is_old = or_(is_old, and_(UploadedModel.phase == "ready", UploadedModel.used_at <= at - retention))
    needed = (
        select(Job.id)
        .where(Job.owner == UploadedModel.owner, Job.status.in_(_active()))
        .where(Job.request["model_id"].as_string() == UPLOAD + UploadedModel.name)
    )
    statement = select(UploadedModel).where(is_old, ~needed.exists()).limit(limit).with_for_update(skip_locked=True)
    return [_delete(session, model) for model in session.scalars(statement).all()]


def _note_completion(session: Session, model: UploadedModel) -> None:
    if model.phase == "weights" and all(file.received == file.size for file in list_files(session, model.id)):
        model.phase = "ready"
        session.flush()


def _count_pieces(session: Session, file: ModelFile) -> tuple[int, int]:
    """Return the number of pieces of a file, and of its model."""
    counts = select(func.count().filter(ModelPiece.path == file.path), func.count())
    of_file, of_model = session.execute(counts.where(ModelPiece.model_id == file.model_id)).one()
    return of_file, of_model


def _is_needed(session: Session, model: UploadedModel) -> bool:
    needed = select(Job.id).where(
        Job.owner == model.owner,
        Job.status.in_(_active()),
        Job.request["model_id"].as_string() == UPLOAD + model.name,
    )
    return session.execute(needed.limit(1)).first() is not None


def _active() -> Sequence[Status]:
    return [status for status in Status if not status.is_terminal]


def _delete(session: Session, model: UploadedModel) -> Removed:
    keys = session.scalars(select(ModelPiece.storage_key).where(ModelPiece.model_id == model.id)).all()
    removed = Removed(storage_keys=tuple(keys), work_key=model.skeleton_key)
    session.execute(delete(UploadedModel).where(UploadedModel.id == model.id))
    session.expunge(model)
    return removed


def _mine(owner: str, name: str) -> Select[UploadedModel]:
    return select(UploadedModel).where(UploadedModel.owner == owner, UploadedModel.name == name)


def _only(model: UploadedModel | None) -> UploadedModel:
    if model is None:
        raise UploadedModelNotFoundError("you have uploaded no model with this name; GET /models lists them")
    return model
