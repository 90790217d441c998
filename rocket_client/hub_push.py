"""Pushing an export of a job to a repository on the Hugging Face Hub.

Pushing is idempotent. After a failure or an interruption it resumes: downloaded files are kept, only files that the Hub
does not have are uploaded, and they appear in the repository in one commit or not at all.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from rocket_client._defaults import noop
from rocket_client._download import choose_artifacts, nothing_to_download
from rocket_client._download_state import DownloadedFile, DownloadProgress
from rocket_client._paths import job_path
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
from rocket_core import __version__

# The first that a job has is pushed.
_EXPORTS = ("factored", "gguf", "compressed-tensors", "dense")
_MAIN = "main"
_RETRYABLE_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})


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
    revision: str = _MAIN
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
        export: kind of the export, such as `factored` or `gguf`.
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
    on_progress: Callable[[DownloadProgress], None] = noop,
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
    with _hub_errors(destination):
        validate_repo_id(destination.repository)
    token = _token(destination)
    job, chosen = _choose(rocket, job_id, export)
    api = HfApi(token=token, library_name="rocket-compress", library_version=__version__)
    with _hub_errors(destination):
        repository = _prepare(api, destination)
    files = rocket.download(job_id, folder or default_folder(job_id), exports=[chosen], on_progress=on_progress)
    inner = [file for file in files if file.artifact.name.startswith(f"{chosen}/")]
    on_upload(inner)
    message = destination.message or _message(job, chosen)
    with _hub_errors(destination):
        before = api.repo_info(repository, revision=destination.revision).sha
        operations = [
            CommitOperationAdd(path_in_repo=file.artifact.name.removeprefix(f"{chosen}/"), path_or_fileobj=file.path)
            for file in inner
        ]
        commit = api.create_commit(repository, operations, commit_message=message, revision=destination.revision)
    return PushedExport(
        repository=repository,
        url=f"{api.endpoint}/{repository}",
        revision=destination.revision,
        commit=commit.oid,
        is_new=commit.oid != before,
        export=chosen,
        files=inner,
    )


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
    if not token.isascii() or not token.isprintable():
        raise InvalidArgumentError("the Hub token contains characters other than printable ASCII; copy it again")
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
    chosen = export or next((kind for kind in _EXPORTS if kind in exports), _EXPORTS[0])
    # Raises an error if the job does not have it.
    choose_artifacts(job_id, artifacts, [chosen])
    return job, chosen


def _prepare(api: HfApi, destination: Destination) -> str:
    """Create repository and branch if necessary, and return the repository's full name."""
    created = api.create_repo(destination.repository, private=True if destination.private else None, exist_ok=True)
    repository = created.repo_id
    # An existing repository keeps its visibility.
    if destination.private and not api.repo_info(repository).private:
        raise PublicRepositoryError(
            f"{repository} exists and is public; make it private on the Hub, or push to another repository"
        )
    if destination.revision != _MAIN:
        api.create_branch(repository, branch=destination.revision, exist_ok=True)
    return repository


@contextmanager
def _hub_errors(destination: Destination) -> Iterator[None]:
    """Convert errors of the Hub's client to our errors."""
    name = destination.repository
    try:
        # For example about labels missing in the model card, which the user cannot change.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except HFValidationError as error:
        raise InvalidArgumentError(
            f"{name!r} is not a repository name: {error}; write NAMESPACE/NAME with letters, digits, -, _ and ."
        ) from error
    except HfHubHTTPError as error:
        raise _refusal(name, error) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise HubUnreachableError(
            f"the Hub does not answer ({error or type(error).__name__}); try again to continue"
        ) from error
    except ValueError as error:
        # The Hub's client raises this if the Hub refused a file or the model card.
        raise HubRefusesError(f"the Hub rejects the push to {name}: {error}") from error
    except RuntimeError as error:
        # The upload of a large file raises this for every error.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(name, error.__cause__) from error
        raise HubUnreachableError(
            f"the Hub's file store does not accept a file ({error}); try again to continue"
        ) from error


def _refusal(name: str, error: HfHubHTTPError) -> ClientError:
    status = error.response.status_code
    message = error.server_message or HTTPStatus(status).phrase
    if status == HTTPStatus.UNAUTHORIZED and not isinstance(error, RepositoryNotFoundError):
        return HubTokenError(f"the Hub does not know the token ({message}); create a new one in your Hub settings")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return HubForbiddenError(f"the token may not write to {name} ({message}); use a token with write access")
    if status in _RETRYABLE_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HubUnreachableError(f"the Hub answers with status {status} ({message}); try again to continue")
    if isinstance(error, RevisionNotFoundError):
        return HubRefusesError(f"{name} has no such branch; give --revision a branch, not a commit")
    return HubRefusesError(f"the Hub rejects writing to {name} (status {status}: {message})")
