"""Errors of the client.

ClientError
├── InvalidArgumentError       an argument is not valid; nothing was sent
├── ServerUnreachableError     the server does not answer (worth retrying)
│   └── StoreUnreachableError      the store that the server redirects to does not serve a file
├── UnexpectedAnswerError      the answer is not from a Rocket server that this client understands
├── ProblemError               the server refuses, with a reason
├── DetachedError              the user stopped watching a job, which continues
├── DownloadError
│   ├── NothingToDownloadError     the job has no such artifacts
│   ├── UnsafeNameError            an artifact's name leads out of the folder
│   ├── FolderBusyError            another download writes to the folder
│   ├── NotEnoughDiskError         the artifacts do not fit
│   └── DigestMismatchError        a file is not what the server announced
└── PushError
    ├── HubTokenError              the Hub's token is missing or unknown
    ├── HubForbiddenError          the token may not write to the repository
    ├── HubUnreachableError        the Hub does not answer (worth retrying)
    ├── PublicRepositoryError      the repository should be private, but is public
    └── HubRefusesError            the Hub refuses for another reason

Messages say what is wrong, where, and what to do. `code` is stable, for programs.
"""

from rocket_core.errors import CodedError, ExitCode

# Statuses after which the same request may succeed: too many requests, and service unavailable.
_RETRYABLE_STATUSES = frozenset({429, 503})


class ClientError(CodedError, code="client_error"):
    """Base class of the client's errors.

    Attributes:
        code: stable name of the kind of error.
        exit_code: exit code of a command that ends with the error; for a `ProblemError` it depends on the problem.
        retryable: whether the same request may succeed later.
        retry_after: seconds after which the server asks for a retry; None if it does not say.
    """

    retry_after: float | None = None


class InvalidArgumentError(ClientError, code="invalid_argument", exit_code=ExitCode.INVALID):
    """An argument is not valid; nothing was sent."""


class ServerUnreachableError(ClientError, code="server_unreachable", retryable=True):
    """The server does not answer.

    Attributes:
        server: its address.
        reason: the network's error message.
        may_have_arrived: whether the server may have processed the request nevertheless.
    """

    def __init__(self, server: str, reason: str, *, may_have_arrived: bool) -> None:
        super().__init__(
            f"{server} does not answer ({reason}); start it with `rocket serve`, or name another server with --server "
            "or ROCKET_SERVER"
        )
        self.server = server
        self.reason = reason
        self.may_have_arrived = may_have_arrived


class StoreUnreachableError(ServerUnreachableError, code="store_unreachable"):
    """The store that the server redirects to does not serve a file."""

    def __init__(self, store: str, reason: str, *, retryable: bool = True) -> None:
        super().__init__(store, reason, may_have_arrived=True)
        self.retryable = retryable
        self.args = (
            f"the server stores its files at {store}, which does not serve them ({reason}); check that this "
            "machine can "
            "reach it, and that its clock is right",
        )


class UnexpectedAnswerError(ClientError, code="unexpected_answer", exit_code=ExitCode.INVALID):
    """The answer is not from a Rocket server that this client understands."""

    def __init__(self, server: str, description: str) -> None:
        super().__init__(
            f"{server} does not answer like a Rocket server that this client understands ({description}); check the "
            "address, and that client and server have the same version"
        )


class ProblemError(ClientError):
    """The server refuses, with a problem document (RFC 9457).

    Attributes:
        status: the HTTP status.
        code: stable code of the problem, such as `job_not_found`.
        detail: what is wrong, where, and what to do.
        param: the member of the request that is wrong; None if no single one is.
        request_id: id of the request in the server's log.
    """

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after
        self.retryable = status in _RETRYABLE_STATUSES

    def explained(self, detail: str) -> "ProblemError":
        """Return the same problem with another detail."""
        return ProblemError(
            status=self.status,
            code=self.code,
            detail=detail,
            param=self.param,
            request_id=self.request_id,
            retry_after=self.retry_after,
        )


class DetachedError(ClientError, code="detached", exit_code=ExitCode.INTERRUPTED):
    """The user stopped watching a job, which continues."""


class DownloadError(ClientError, code="download_failed", exit_code=ExitCode.SAVED_STATE):
    """Artifacts cannot be downloaded."""


class NothingToDownloadError(DownloadError, code="nothing_to_download", exit_code=ExitCode.CONFLICT):
    """The job has no such artifacts."""


class UnsafeNameError(DownloadError, code="unsafe_artifact_name"):
    """An artifact's name leads out of the folder, or two names lead to one file."""


class FolderBusyError(DownloadError, code="download_folder_busy", retryable=True):
    """Another download writes to the folder."""


class NotEnoughDiskError(DownloadError, code="insufficient_disk", exit_code=ExitCode.MACHINE_TOO_SMALL):
    """The artifacts do not fit on the disk."""


class DigestMismatchError(DownloadError, code="digest_mismatch"):
    """A downloaded file is not what the server announced."""


class PushError(ClientError, code="push_failed", exit_code=ExitCode.INVALID):
    """An export cannot be pushed to the Hugging Face Hub."""


class HubTokenError(PushError, code="hub_token_invalid", exit_code=ExitCode.NOT_ALLOWED):
    """The Hub's token is missing or unknown."""


class HubForbiddenError(PushError, code="hub_forbidden", exit_code=ExitCode.NOT_ALLOWED):
    """The token may not write to the repository."""


class HubUnreachableError(PushError, code="hub_unreachable", retryable=True):
    """The Hub does not answer, or is busy."""


class PublicRepositoryError(PushError, code="repository_is_public", exit_code=ExitCode.CONFLICT):
    """The repository should be private, but is public."""


class HubRefusesError(PushError, code="hub_refuses"):
    """The Hub refuses for another reason."""
