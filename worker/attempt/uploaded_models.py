"""Uploaded models, put together from their pieces for a job."""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import StorageError
from app.shared.models import ModelFile, ModelPiece
from app.shared.repositories import models
from app.shared.storage import ArtifactStore
from app.shared.storage.store import storage_errors
from rocket_core.system.files import atomic_write


def fetch_model(
    database: Database, store: ArtifactStore, owner: str, name: str, *, folder: Path, before_each: Callable[[], None]
) -> Path:
    """Copy an uploaded model to this machine, and return its folder; files that are complete already are kept.

    Args:
        database: the database.
        store: where the pieces are.
        owner: the tenant.
        name: the model.
        folder: where to put it, for this model only.
        before_each: called before each piece; what it raises ends the copy.

    Raises:
        UploadedModelNotFoundError: the model was deleted.
        ModelNotReadyError: parts of it have not arrived.
        StorageError: a piece is missing or damaged, or a file cannot be written.
    """
    with database.snapshot() as session:
        model = models.get_model(session, owner, name)
        models.require_ready(session, model)
        files = models.list_files(session, model.id)
    with storage_errors(folder):
        # Another model may have had the same name when an earlier job, which this one repeats, copied it.
        marker = folder / model.id
        if not marker.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            marker.touch()
        for file in files:
            target = folder / name / file.path
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                with database.snapshot() as session:
                    pieces = models.list_pieces(session, file)
                _fetch(store, file, pieces, target, before_each)
    return folder / name


def _fetch(
    store: ArtifactStore, file: ModelFile, pieces: Sequence[ModelPiece], target: Path, before_each: Callable[[], None]
) -> None:
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    with atomic_write(target, temporary=temporary) as stream:
        for piece in pieces:
            before_each()
            digest = hashlib.sha256()
            for chunk in store.read(piece.storage_key, 0, piece.size):
                digest.update(chunk)
                stream.write(chunk)
            if digest.hexdigest() != piece.sha256:
                raise StorageError(
                    f"a piece of {file.path} is damaged in the store; delete the model and upload it again"
                )
