"""Pushing an export of a job to a repository on the Hugging Face Hub.

Pushing is idempotent. After a failure or an interruption it resumes: downloaded files are kept, only files that the Hub
does not have are uploaded, and they appear in the repository in one commit or not at all.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import get_token

from rocket_client._defaults import noop
from rocket_client._download import DownloadedFile, choose_artifacts, nothing_to_download
from rocket_client._requests import job_path
from rocket_client._wire import TransferProgress
from rocket_client.client import Rocket
from rocket_client.errors import (
    ClientError,
    HubForbiddenError,
    HubRefusesError,
    HubTokenError,
    HubUnreachableError,
    InvalidArgumentError,
    PublicRepositoryError,
)
from rocket_client.models import Artifact, Job
from rocket_core import errors
from rocket_core.engines import PUSHED_FIRST
from rocket_core.hub.upload import MAIN, HubDestination, HubRepository

# The client's own classes, which have exit codes.
_ERRORS: Mapping[type[errors.RocketError], type[ClientError]] = {
    errors.InvalidConfigError: InvalidArgumentError,
    errors.UploadTokenError: HubTokenError,
    errors.UploadForbiddenError: HubForbiddenError,
    errors.HubUnavailableError: HubUnreachableError,
    errors.UploadVisibilityError: PublicRepositoryError,
    errors.UploadRefusedError: HubRefusesError,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Destination of an export on the Hub.

    Attributes:
        repository: `namespace/name`, created if necessary; without a namespace it belongs to the token's owner.
        private: whether the repository must be private; an existing public one is refused then.
        revision: branch, created if necessary.
        message: commit message; None generates one.
        token: Hub token with write access; None takes that of HF_TOKEN, or of `hf auth login`.
    """

    repository: str
    private: bool = False
    revision: str = MAIN
    message: str | None = None
    token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedExport:
    """An export in a repository on the Hub.

    Attributes:
        repository: `namespace/name`.
        url: address of the repository's page.
        revision: branch.
        commit: the branch's last commit, which has these files.
        is_new: whether this push created that commit; otherwise the repository already had all files.
        export: kind of the export, such as `rocket` or `gguf`.
        files: files of the export.
    """

    repository: str
    url: str
    revision: str
    commit: str
    is_new: bool
    export: str
    files: Sequence[DownloadedFile]


def push_export(
    rocket: Rocket,
    job_id: str,
    destination: Destination,
    *,
    export: str | None = None,
    folder: Path | None = None,
    on_progress: Callable[[TransferProgress], None] = noop,
    on_upload: Callable[[Sequence[DownloadedFile]], None] = noop,
) -> PushedExport:
    """Push an export of a job that has succeeded to the Hub.

    Args:
        rocket: a client of the server that has the job.
        job_id: the job.
        destination: where to push.
        export: kind of the export; None takes the one made for the engine.
        folder: download folder, which a second call reuses; None takes `default_folder`.
        on_progress: called while the export is downloaded.
        on_upload: called after the download and before the upload.

    Raises:
        InvalidArgumentError: the repository's name is not valid.
        HubTokenError: the token is missing, or the Hub does not know it.
        HubForbiddenError: the token may not write to the repository.
        HubUnreachableError: the Hub does not answer, or is busy.
        PublicRepositoryError: the repository should be private, but is public.
        HubRefusesError: the Hub refuses for another reason.
        DownloadError: see `Rocket.download`.
        ClientError: the server cannot be reached, or refuses.
        OSError: a file cannot be read or written.
    """
    # Check everything that can be checked before gigabytes are transferred.
    with _client_errors():
        repository = HubRepository(
            HubDestination(
                repository=destination.repository,
                token=_token(destination),
                private=destination.private,
                revision=destination.revision,
            )
        )
    job, chosen = _choose(rocket, job_id, export)
    with _client_errors():
        repository.create()
    files = rocket.download(job_id, folder or default_folder(job_id), exports=[chosen], on_progress=on_progress)
    inner = [file for file in files if file.artifact.name.startswith(f"{chosen}/")]
    on_upload(inner)
    with _client_errors():
        pushed = repository.commit(
            [(file.artifact.name.removeprefix(f"{chosen}/"), file.path) for file in inner],
            destination.message or _message(job, chosen),
        )
    return PushedExport(**asdict(pushed), revision=destination.revision, export=chosen, files=inner)


def default_folder(job_id: str) -> Path:
    """Return a job's download folder in the user's cache; raises InvalidArgumentError if the id is not valid."""
    # The id becomes part of a path, so it is validated.
    job_path(job_id)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rocket" / job_id


def _token(destination: Destination) -> str:
    token = (destination.token or get_token() or "").strip()
    if not token:
        raise HubTokenError(
            "no Hugging Face Hub token was found; set HF_TOKEN to one with write access, or name the variable that "
            "holds it with --hub-token-env"
        )
    return token


def _message(job: Job, export: str) -> str:
    removed = "" if job.result is None else f" without {100 * job.result.achieved_ratio:.1f}% of its linear parameters"
    return f"{job.model_id}{removed}, {export}, compressed by Rocket"


def _choose(rocket: Rocket, job_id: str, export: str | None) -> tuple[Job, str]:
    job = rocket.get_job(job_id)
    artifacts: Sequence[Artifact] = rocket.artifacts(job_id)
    if not artifacts:
        raise nothing_to_download(job)
    exports = {artifact.name.partition("/")[0] for artifact in artifacts}
    chosen = export or next((kind for kind in PUSHED_FIRST if kind in exports), PUSHED_FIRST[0])
    # Raises an error if the job does not have it.
    choose_artifacts(job_id, artifacts, [chosen])
    return job, chosen


@contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except errors.RocketError as error:
        raise _ERRORS[type(error)](str(error)) from error
