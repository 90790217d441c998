"""An export of a job to a repository of the Hugging Face Hub, as a step of its own that can be repeated.

Called again after it failed, was interrupted or has succeeded, it goes on: what is downloaded stays, the Hub is sent
only what it has not, and the files appear in the repository in one commit or not at all.
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

from rocket_client._defaults import ignore
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

# The smaller one first.
_EXPORTS = ("factored", "dense")
_MAIN = "main"
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where an export goes.

    Attributes:
        repository: `namespace/name`, made if need be; without a namespace it is the token's owner's.
        private: only its owner may read it. A repository that others may read is refused then.
        revision: branch, made if need be.
        message: of the commit; None says what it holds.
        token: of the Hub, with the right to write; None takes that of HF_TOKEN, or of `hf auth login`.
    """

    repository: str
    private: bool = False
    revision: str = _MAIN
    message: str | None = None
    token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedExport:
    """What is in a repository now.

    Attributes:
        repository: `namespace/name`.
        url: where it is looked at.
        revision: branch.
        commit: the branch's last commit, which has these files.
        is_new: whether that commit was made now; otherwise the repository had all of it.
        export: `factored` or `dense`.
        files: of the export.
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
    on_progress: Callable[[DownloadProgress], None] = ignore,
    on_upload: Callable[[Sequence[DownloadedFile]], None] = ignore,
) -> PushedExport:
    """Bring an export of a job that has succeeded to the Hub.

    Args:
        rocket: a client of the server that has the job.
        job_id: the job.
        destination: where to.
        export: `factored` or `dense`; None takes the first of them that the job has.
        folder: what is downloaded to; None takes `default_folder`. A second call finds it there.
        on_progress: told while it is downloaded.
        on_upload: told once it is downloaded, before it is uploaded.

    Raises:
        InvalidArgumentError: the repository's name cannot be one.
        HubTokenError: there is no token, or the Hub does not know it.
        HubForbiddenError: the token may not write there.
        HubUnreachableError: the Hub does not answer, or asks for time.
        PublicRepositoryError: it is to be private, and others may read it.
        HubRefusesError: the Hub refuses for another reason.
        DownloadError: as `Rocket.download`.
        ClientError: the server cannot be reached, or refuses.
        OSError: a file cannot be read or written.
    """
    # All that can be told beforehand, before gigabytes are moved.
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
    """Where a job's files are kept on their way, in this user's cache; raises InvalidArgumentError for no job's id."""
    # An id becomes part of a path.
    job_path(job_id)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rocket" / job_id


def _token(destination: Destination) -> str:
    token = (destination.token or get_token() or "").strip()
    if not token:
        raise HubTokenError(
            "there is no token of the Hugging Face Hub; set HF_TOKEN to one that may write, or name the variable that "
            "has it with --hub-token-env"
        )
    if not token.isascii() or not token.isprintable():
        raise InvalidArgumentError("a Hub token has printable ASCII characters only")
    return token


def _message(job: Job, export: str) -> str:
    removed = "" if job.result is None else f" without {100 * job.result.achieved_ratio:.1f}% of its linear parameters"
    return f"{job.model_id}{removed}, {export}, compressed by Rocket"


def _choose(rocket: Rocket, job_id: str, export: str | None) -> tuple[Job, str]:
    job = rocket.get_job(job_id)
    artifacts: Sequence[Artifact] = rocket.artifacts(job_id)
    if not artifacts:
        raise nothing_to_download(job)
    found = {artifact.name.partition("/")[0] for artifact in artifacts}
    chosen = export or next((kind for kind in _EXPORTS if kind in found), _EXPORTS[0])
    # Refuses one that the job has not.
    choose_artifacts(job_id, artifacts, [chosen])
    return job, chosen


def _prepare(api: HfApi, destination: Destination) -> str:
    """Repository and branch, made if need be; returns the repository's whole name."""
    made = api.create_repo(destination.repository, private=True if destination.private else None, exist_ok=True)
    repository = made.repo_id
    # One that was there is as it was made.
    if destination.private and not api.repo_info(repository).private:
        raise PublicRepositoryError(
            f"{repository} exists, and everybody may read it; make it private on the Hub, or push to another repository"
        )
    if destination.revision != _MAIN:
        api.create_branch(repository, branch=destination.revision, exist_ok=True)
    return repository


@contextmanager
def _hub_errors(destination: Destination) -> Iterator[None]:
    """Turn what the Hub's client raises into errors of ours."""
    name = destination.repository
    try:
        # Such as of a model card without some label: nothing that whoever pushes could do about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except HFValidationError as error:
        raise InvalidArgumentError(
            f"{name!r} is no repository's name: {error}; write NAMESPACE/NAME, of letters, digits, -, _ and ."
        ) from error
    except HfHubHTTPError as error:
        raise _refusal(name, error) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise HubUnreachableError(
            f"the Hub does not answer ({error or type(error).__name__}); call this again to go on"
        ) from error
    except ValueError as error:
        # Its way to say that the Hub refused a file, or the model card.
        raise HubRefusesError(f"the Hub refuses what is pushed to {name}: {error}") from error
    except RuntimeError as error:
        # What an upload of a large file raises, whatever has happened to it.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(name, error.__cause__) from error
        raise HubUnreachableError(
            f"the Hub's store does not take a file ({error}); call this again to go on"
        ) from error


def _refusal(name: str, error: HfHubHTTPError) -> ClientError:
    status = error.response.status_code
    said = error.server_message or HTTPStatus(status).phrase
    if status == HTTPStatus.UNAUTHORIZED and not isinstance(error, RepositoryNotFoundError):
        return HubTokenError(f"the Hub does not know the token ({said}); make a new one at its settings, tokens")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return HubForbiddenError(f"the token may not write to {name} ({said}); it needs the right to write there")
    if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HubUnreachableError(f"the Hub answers with status {status} ({said}); call this again to go on")
    if isinstance(error, RevisionNotFoundError):
        return HubRefusesError(f"{name} has no such branch; name a branch, not a commit, with --revision")
    return HubRefusesError(f"the Hub refuses to have {name} written (status {status}: {said})")
