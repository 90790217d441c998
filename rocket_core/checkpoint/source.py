"""Finding a model: a local folder, or a repository of the Hugging Face Hub at one commit."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from rocket_core.checkpoint.reader import Checkpoint
from rocket_core.errors import HubUnavailableError, ModelNotFoundError

# Weights as safetensors, configuration and tokenizer; never pickles, never code.
_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*", "README.md"]
_IGNORED = ["*/*", "consolidated*"]


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
    try:
        commit = HfApi().model_info(model, revision=revision).sha
        path = snapshot_download(model, revision=commit, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise HubUnavailableError(
            f"there is no folder {model!r}, and the Hub cannot be reached to look for a repository of that name "
            f"({type(error).__name__}); check the spelling, or try again later"
        ) from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{model} is gated: accept its terms on the Hub and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{model} has no revision {revision!r}; check the branch, tag or commit") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ModelNotFoundError(
            f"there is no folder {model!r} and no repository of that name that you may read; check the spelling, or "
            "set HF_TOKEN for a private one"
        ) from error
    except HfHubHTTPError as error:
        raise HubUnavailableError(f"the Hub failed to answer for {model} ({error}); try again later") from error
    return ModelSource(name=model, folder=Path(path), commit=commit)
