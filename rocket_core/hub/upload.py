"""Upload of files to a repository of the Hugging Face Hub, in one commit. Loads no torch.

Everything that can be repeated is: only files that the Hub does not have are sent, and they appear in the repository in
one commit or not at all.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from rocket_core.errors import (
    HubUnavailableError,
    InvalidConfigError,
    RocketError,
    UploadForbiddenError,
    UploadRefusedError,
    UploadTokenError,
    UploadVisibilityError,
)
from rocket_core.version import __version__

MAIN = "main"
"""The branch that every repository has."""

_RETRYABLE_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDestination:
    """Destination of an upload to the Hub.

    Attributes:
        repository: `namespace/name`, created if necessary; without a namespace it belongs to the token's owner.
        token: token with write access.
        private: whether the repository must be private; an existing public one is refused then.
        revision: branch, created if necessary.
    """

    repository: str
    token: str = field(repr=False)
    private: bool = False
    revision: str = MAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class HubCommit:
    """The last commit of a branch, which has all uploaded files.

    Attributes:
        repository: `namespace/name`.
        url: address of the repository's page.
        commit: the commit.
        is_new: whether this upload created it; otherwise the repository already had all files.
    """

    repository: str
    url: str
    commit: str
    is_new: bool


class HubRepository:
    """A repository on the Hub to write to.

    Args:
        destination: where it is.

    Raises:
        InvalidConfigError: the repository's name is not valid, or the token is not text that a header can hold.
    """

    def __init__(self, destination: HubDestination) -> None:
        self._destination = destination
        with _hub_errors(destination.repository):
            validate_repo_id(destination.repository)
        if not destination.token.isascii() or not destination.token.isprintable():
            raise InvalidConfigError("the Hub token contains characters other than printable ASCII; copy it again")
        self._api = HfApi(token=destination.token, library_name="rocket-compress", library_version=__version__)
        self._name = destination.repository

    def create(self) -> None:
        """Create repository and branch if necessary.

        Raises:
            UploadTokenError: the Hub does not know the token.
            UploadForbiddenError: the token may not write to the repository.
            HubUnavailableError: the Hub does not answer, or is busy.
            UploadVisibilityError: the repository should be private, but is public.
            UploadRefusedError: the Hub refuses for another reason.
        """
        wanted = self._destination
        with _hub_errors(wanted.repository):
            private = True if wanted.private else None
            self._name = self._api.create_repo(wanted.repository, private=private, exist_ok=True).repo_id
            # An existing repository keeps its visibility.
            if wanted.private and not self._api.repo_info(self._name).private:
                raise UploadVisibilityError(
                    f"{self._name} exists and is public; make it private on the Hub, or push to another repository"
                )
            if wanted.revision != MAIN:
                self._api.create_branch(self._name, branch=wanted.revision, exist_ok=True)

    def commit(
        self, files: Sequence[tuple[str, Path]], message: str, *, on_sent: Callable[[int], None] = lambda _sent: None
    ) -> HubCommit:
        """Upload files, and add them to the branch in one commit.

        Args:
            files: names in the repository, and the files.
            message: commit message.
            on_sent: called after each file with the bytes of all files so far; its errors end the upload.

        Raises:
            UploadTokenError, UploadForbiddenError, HubUnavailableError, UploadRefusedError: see `create`.
            OSError: a file cannot be read.
        """
        revision, sent = self._destination.revision, 0
        with _hub_errors(self._destination.repository):
            before = self._api.repo_info(self._name, revision=revision).sha
            operations = []
            for name, path in files:
                size = path.stat().st_size
                operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
                self._api.preupload_lfs_files(self._name, [operation], revision=revision)
                operations.append(operation)
                sent += size
                on_sent(sent)
            commit = self._api.create_commit(self._name, operations, commit_message=message, revision=revision)
        return HubCommit(
            repository=self._name,
            url=f"{self._api.endpoint}/{self._name}",
            commit=commit.oid,
            is_new=commit.oid != before,
        )


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Convert errors of the Hub's client to our errors."""
    try:
        # For example about labels missing in the model card, which the user cannot change.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except HFValidationError as error:
        raise InvalidConfigError(
            f"{name!r} is not a repository name: {error}; write NAMESPACE/NAME with letters, digits, -, _ and ."
        ) from error
    except HfHubHTTPError as error:
        raise _refusal(name, error) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise HubUnavailableError(
            f"the Hub does not answer ({error or type(error).__name__}); try again to continue"
        ) from error
    except ValueError as error:
        # The Hub's client raises this if the Hub refused a file or the model card.
        raise UploadRefusedError(f"the Hub rejects the push to {name}: {error}") from error
    except RuntimeError as error:
        # The upload of a large file raises this for every error.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(name, error.__cause__) from error
        raise HubUnavailableError(
            f"the Hub's file store does not accept a file ({error}); try again to continue"
        ) from error


def _refusal(name: str, error: HfHubHTTPError) -> RocketError:
    status = error.response.status_code
    message = error.server_message or HTTPStatus(status).phrase
    if status == HTTPStatus.UNAUTHORIZED and not isinstance(error, RepositoryNotFoundError):
        return UploadTokenError(f"the Hub does not know the token ({message}); create a new one in your Hub settings")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return UploadForbiddenError(f"the token may not write to {name} ({message}); use a token with write access")
    if status in _RETRYABLE_STATUSES or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HubUnavailableError(f"the Hub answers with status {status} ({message}); try again to continue")
    if isinstance(error, RevisionNotFoundError):
        return UploadRefusedError(f"{name} has no such branch; give --revision a branch, not a commit")
    return UploadRefusedError(f"the Hub rejects writing to {name} (status {status}: {message})")
