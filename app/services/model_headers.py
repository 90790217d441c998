"""Headers of uploaded models on this machine: what the process that judges models reads in place of the models."""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.shared.database import Database
from app.shared.errors import ModelConflictError
from app.shared.models import ModelFile, ModelPiece, UploadedModel
from app.shared.repositories import models
from app.shared.storage import ArtifactStore, WorkFolders
from app.shared.storage.store import storage_errors
from rocket_core.inspection.files.model_files import CONFIG_NAME
from rocket_core.inspection.files.model_parts import is_weights
from rocket_core.inspection.files.safetensors_headers import INDEX_NAME

_COMPLETE = "headers"


class ModelHeaders:
    """One folder per model that was judged on this machine, with the model's own names and sizes.

    In it are config.json, the index, and the headers of the weights, which never change. All other bytes are holes.

    Args:
        database: the database.
        artifacts: the store with the pieces.
        work: where the folders are.
    """

    def __init__(self, database: Database, artifacts: ArtifactStore, work: WorkFolders) -> None:
        self._database = database
        self._artifacts = artifacts
        self._work = work

    def find(self, owner: str, name: str) -> Path:
        """Return the folder with the headers of a tenant's model, fetched from the store if needed.

        Raises:
            UploadedModelNotFoundError: the model does not exist, or belongs to another tenant.
            ModelConflictError: its headers have not arrived, or were not judged.
            StorageError: they cannot be fetched or written.
        """
        with self._database.snapshot() as session:
            model = models.get_model(session, owner, name)
        if model.phase == "headers":
            raise ModelConflictError("the headers of this model were not judged yet; continue its upload")
        return self.fetch(model)

    def fetch(self, model: UploadedModel) -> Path:
        """Return the folder of a model whose headers have arrived; raises the same errors as `find`."""
        parent = self._work.path(model.skeleton_key)
        folder = parent / _COMPLETE
        if folder.is_dir():
            return folder
        with self._database.snapshot() as session:
            files = models.list_files(session, model.id)
            pieces = {file.path: models.list_pieces(session, file) for file in files if _is_judged(file.path)}
        missing = next((file for file in files if not has_head(file)), None)
        if missing is not None:
            raise ModelConflictError(
                f"{missing.path} is needed to judge the model, and only {missing.received} bytes of it have arrived; "
                "send config.json, tokenizer and all other small files, and the header of each safetensors file"
            )
        # Two requests may write it at once; what appears under the name is complete.
        temporary = parent / f"{secrets.token_hex(8)}.tmp"
        with storage_errors(parent):
            try:
                self._write(temporary, files, pieces)
                if not folder.is_dir():
                    temporary.rename(folder)
            except FileExistsError:
                pass
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _write(self, folder: Path, files: Sequence[ModelFile], pieces: Mapping[str, Sequence[ModelPiece]]) -> None:
        for file in files:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as stream:
                left = file.head or 0
                for piece in pieces.get(file.path, ()):
                    if left == 0:
                        break
                    count = min(left, piece.size)
                    for chunk in self._artifacts.read(piece.storage_key, 0, count):
                        stream.write(chunk)
                    left -= count
                os.truncate(stream.fileno(), file.size)


def has_head(file: ModelFile) -> bool:
    """Return whether those bytes of a file have arrived that are needed to judge its model."""
    return file.head is not None and file.received >= file.head


def _is_judged(path: str) -> bool:
    return is_weights(path) or path in {CONFIG_NAME, INDEX_NAME}
