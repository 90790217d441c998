"""Finding a model: a local folder, or a repository of the Hugging Face Hub at one commit."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rocket_core.checkpoint.reader import Checkpoint
from rocket_core.errors import ModelNotFoundError
from rocket_core.hub import IGNORED, PATTERNS, hub_errors, resolve_commit


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: what the user asked for: a repository id, or the folder's name.
        folder: absolute path of the files.
        commit: commit of the repository; None for a local folder.
    """

    name: str
    folder: Path
    commit: str | None

    def revision(self, checkpoint: Checkpoint) -> str:
        """What identifies the weights: the commit, or for a local folder the hash of config.json and all weights."""
        if self.commit is not None:
            return self.commit
        digest = hashlib.sha256()
        for file in (self.folder / "config.json", *checkpoint.files):
            with file.open("rb") as stream:
                digest.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()};".encode())
        return f"sha256:{digest.hexdigest()}"


def find_model(model: str, revision: str | None = None) -> ModelSource:
    """Finds a model's files, downloading them if they are on the Hub.

    An existing folder wins over a repository of that name. Of a repository only safetensors, JSON and tokenizer files
    are fetched, at the commit that `revision` names when this is called.

    Args:
        model: path of a folder, or repository id `namespace/name`.
        revision: branch, tag or commit of the repository; None is its main branch.

    Raises:
        ModelNotFoundError: neither a folder nor a repository, no such revision, or no access.
        HubUnavailableError: the Hub does not answer.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelNotFoundError(f"{model} is a local folder and has no revision {revision!r}; leave revision out")
        resolved = folder.resolve()
        return ModelSource(name=resolved.name, folder=resolved, commit=None)
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{model!r} is neither a folder nor a repository id of the form namespace/name; check the spelling"
        ) from error
    subject = f"repository {model} (there is no such folder)"
    commit = resolve_commit(model, revision, subject)
    with hub_errors(subject):
        path = snapshot_download(model, revision=commit, allow_patterns=[*PATTERNS], ignore_patterns=[*IGNORED])
    return ModelSource(name=model, folder=Path(path), commit=commit)
