"""Finding a model: a local folder, or a repository of the Hugging Face Hub at one commit."""

import glob
import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from rocket_core.checkpoint.transfer import Transfer
from rocket_core.config import CompressionConfig
from rocket_core.errors import CorruptCheckpointError, InsufficientDiskError, ModelNotFoundError
from rocket_core.hub import cache as hub_cache
from rocket_core.hub.repository import HubAccess, Repository, check_repository_id, find_repository, hub_errors
from rocket_core.hub.requests import has_no_revision
from rocket_core.inspection.checks.feasibility import check_feasible
from rocket_core.inspection.checks.preconditions import check_config, parse_config
from rocket_core.inspection.files.model_advice import advice_on_path
from rocket_core.inspection.files.model_files import check_adapter, vet_folder
from rocket_core.system.machine import free_disk, gibibytes

if TYPE_CHECKING:
    from rocket_core.checkpoint.reader import Checkpoint

# Covers the listing, config.json and all headers of a repository.
_ASK_SECONDS = 60.0
# An active download writes far more often.
_REMAINS_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The location of a model's files.

    Attributes:
        name: the requested name: a repository id, or the folder's name.
        folder: absolute path of the files.
        commit: commit of the repository; None for a local folder.
    """

    name: str
    folder: Path
    commit: str | None

    def revision(self, checkpoint: "Checkpoint") -> str:
        """Return an identifier of the weights.

        It is the commit, or for a local folder the hash of config.json and all weights.
        """
        if self.commit is not None:
            return self.commit
        digest = hashlib.sha256()
        for file in (self.folder / "config.json", *checkpoint.files):
            with file.open("rb") as stream:
                digest.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()};".encode())
        return f"sha256:{digest.hexdigest()}"


def find_model(
    model: str,
    revision: str | None = None,
    *,
    hub: HubAccess = HubAccess(),
    config: CompressionConfig | None = None,
    transfer: Transfer | None = None,
) -> ModelSource:
    """Find a model's files, downloading them if they are on the Hub.

    An existing folder takes precedence over a repository of that name. From a repository, only JSON and tokenizer files
    and the safetensors that make up the model are fetched, at the commit that `revision` names at the time of the call,
    and only after its config.json, safetensors headers and sizes have been checked.

    Args:
        model: path of a folder, or repository id `namespace/name`.
        revision: branch, tag or commit of the repository; None is its main branch.
        hub: credentials and cache directory for Hub access.
        config: the compression that a repository's headers must allow before its weights are downloaded; None checks
            only that the model can be compressed at all.
        transfer: notified of bytes that arrive, and able to stop the download.

    Raises:
        ModelNotFoundError: the model is neither a folder nor a repository, the revision does not exist, or access is
            denied.
        UnsupportedArchitectureError: the repository holds no model that can be compressed.
        InfeasibleBudgetError: the ratio or the size cannot be reached with the repository's layers.
        UnmatchedIgnoreError: a pattern of `config.ignore` matches none of the repository's layers.
        InsufficientDiskError: the download does not fit.
        HubCacheBusyError: repositories in use by other processes leave no room in the cache's quota.
        CheckpointFormatError: the repository has no safetensors, or the model has an adapter.
        UnsafeFileError: a file of the model is a link that leads elsewhere, or not a regular file.
        CorruptCheckpointError: its files are damaged, or were not downloaded completely.
        HubUnavailableError: the Hub does not answer.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise has_no_revision(folder, revision)
        resolved = folder.resolve()
        vet_folder(resolved, resolved.name)
        return ModelSource(name=resolved.name, folder=resolved, commit=None)
    if folder.is_file():
        raise ModelNotFoundError(f"{model} is a file; name the folder that it is in")
    check_repository_id(model)
    advice = advice_on_path(folder)
    subject = f"repository {model} (there is no such folder{'' if advice is None else f'; {advice}'})"
    repository = find_repository(model, revision, token=hub.token, seconds=_ASK_SECONDS, subject=subject)
    check_adapter(repository.files, model)
    settings = parse_config(repository.read_config(), model)
    check_config(settings, model)
    weights = repository.read_weights(settings)
    if weights is not None:
        check_feasible(settings, weights, config or CompressionConfig(), model)
    return ModelSource(name=model, folder=_fetch(repository, hub, transfer or Transfer()), commit=repository.commit)


def _fetch(repository: Repository, hub: HubAccess, transfer: Transfer) -> Path:
    names = repository.wanted_files()
    cache = hub.cache or Path(constants.HF_HUB_CACHE)
    cached_repository = cache / repo_folder_name(repo_id=repository.model, repo_type="model")
    if hub.quota_bytes is not None:
        hub_cache.hold(cached_repository)
    _remove_remains(cached_repository / "blobs")
    transfer.total = sum(repository.sizes[name] or 0 for name in names if not _is_cached(repository, name, cache))
    room = hub_cache.Room(
        repository=cached_repository,
        commit=repository.commit,
        size=sum(repository.sizes[name] or 0 for name in names),
        missing=transfer.total,
    )
    if hub.quota_bytes is not None:
        hub_cache.make_room(hub.quota_bytes, room)
    free = free_disk(cache)
    if transfer.total > free:
        raise InsufficientDiskError(
            f"downloading {repository.model} takes {gibibytes(transfer.total)} of disk in {cache}, "
            f"{gibibytes(free)} are free; free some, or set HF_HOME to a folder on a larger disk"
        )
    with hub_errors(repository.subject):
        folder = snapshot_download(
            repository.model,
            revision=repository.commit,
            cache_dir=cache,
            token=hub.token,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=transfer.bars(),
        )
    for name in names:
        size, announced = (Path(folder) / name).stat().st_size, repository.sizes[name]
        if announced is not None and size != announced:
            raise CorruptCheckpointError(
                f"{name} of {repository.model} has {size} bytes, the Hub announces {announced}; remove it from {cache} "
                "and fetch it again"
            )
    vet_folder(Path(folder), repository.model)
    if hub.quota_bytes is not None:
        # The Hub does not always announce sizes.
        hub_cache.make_room(hub.quota_bytes, replace(room, missing=0))
    return Path(folder)


def _is_cached(repository: Repository, name: str, cache: Path) -> bool:
    cached = try_to_load_from_cache(repository.model, name, cache_dir=cache, revision=repository.commit)
    return isinstance(cached, str)


def _remove_remains(blobs: Path) -> None:
    """Remove the remains of killed downloads, which the Hub's client never resumes."""
    for file in blobs.glob("*.incomplete"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _REMAINS_SECONDS:
                file.unlink()
