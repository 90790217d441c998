"""Every error that the client raises on purpose.

ClientError
├── InvalidArgumentError       what was asked for cannot even be sent
├── ServerUnreachableError     no answer from the server (worth retrying)
│   └── StoreUnreachableError      nor from the store that it sends clients to for files
├── UnexpectedAnswerError      an answer, but none of a Rocket server that this client understands
├── ProblemError               the server refuses, and says why
├── DetachedError              the user no longer watches a job, which goes on
├── DownloadError
│   ├── NothingToDownloadError     the job has no such artifacts
│   ├── UnsafeNameError            an artifact's name leads out of the folder
│   ├── FolderBusyError            another download writes to the folder
│   ├── NotEnoughDiskError         the artifacts do not fit
│   └── DigestMismatchError        a file is not what the server announced
└── PushError
    ├── HubTokenError              there is no token of the Hub, or one that it does not know
    ├── HubForbiddenError          the token may not write to the repository
    ├── HubUnreachableError        the Hub does not answer (worth retrying)
    ├── PublicRepositoryError      others may read what was to be private
    └── HubRefusesError            the Hub refuses for another reason

A message says what is wrong, where, and what to do. `code` is stable, for programs.
"""

# Answers after which the same request may succeed: too many requests, and the service not being ready.
_PASSING_STATUSES = frozenset({429, 503})


class ClientError(Exception):
    """Base of all errors of the client.

    Attributes:
        code: stable name of the kind of error.
        is_passing: whether the same request may succeed later.
        retry_after: seconds after which the server wants to be asked again; None if it has not said.
    """

    code: str = "client_error"
    is_passing: bool = False
    retry_after: float | None = None


class InvalidArgumentError(ClientError):
    """What was asked for cannot even be sent."""

    code = "invalid_argument"


class ServerUnreachableError(ClientError):
    """No answer from the server.

    Attributes:
        server: its address.
        reason: what the network says.
        may_have_arrived: whether the server may have acted on the request nevertheless.
    """

    code = "server_unreachable"
    is_passing = True

    def __init__(self, server: str, reason: str, *, may_have_arrived: bool) -> None:
        super().__init__(
            f"{server} does not answer ({reason}); start it with `rocket serve`, or name another server with --server "
            "or ROCKET_SERVER"
        )
        self.server = server
        self.reason = reason
        self.may_have_arrived = may_have_arrived


class StoreUnreachableError(ServerUnreachableError):
    """The server sends clients to a store for its files, and that does not give them."""

    code = "store_unreachable"

    def __init__(self, store: str, reason: str, *, is_passing: bool = True) -> None:
        super().__init__(store, reason, may_have_arrived=True)
        self.is_passing = is_passing
        self.args = (
            f"the server keeps its files at {store}, which does not give them ({reason}); check that this machine can "
            "reach it, and its clock",
        )


class UnexpectedAnswerError(ClientError):
    """An answer, but none of a Rocket server that this client understands."""

    code = "unexpected_answer"

    def __init__(self, server: str, found: str) -> None:
        super().__init__(
            f"{server} answers, but not as a Rocket server that this client understands ({found}); check the address, "
            "and that client and server are of the same version"
        )


class ProblemError(ClientError):
    """The server refuses, and says why in a problem document (RFC 9457).

    Attributes:
        status: the HTTP status.
        code: stable code of the problem, such as `job_not_found`.
        detail: what is wrong, where, and what to do.
        param: the member of the request that is wrong; None if it is none in particular.
        request_id: names the request in the server's log.
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
        self.is_passing = status in _PASSING_STATUSES

    def explained(self, detail: str) -> "ProblemError":
        """The same problem in other words."""
        return ProblemError(
            status=self.status,
            code=self.code,
            detail=detail,
            param=self.param,
            request_id=self.request_id,
            retry_after=self.retry_after,
        )


class DetachedError(ClientError):
    """The user no longer watches a job, which goes on."""

    code = "detached"


class DownloadError(ClientError):
    """Artifacts cannot be downloaded."""

    code = "download_failed"


class NothingToDownloadError(DownloadError):
    """The job has no such artifacts."""

    code = "nothing_to_download"


class UnsafeNameError(DownloadError):
    """An artifact's name leads out of the folder, or two names lead to one file."""

    code = "unsafe_artifact_name"


class FolderBusyError(DownloadError):
    """Another download writes to the folder."""

    code = "download_folder_busy"
    is_passing = True


class NotEnoughDiskError(DownloadError):
    """The artifacts do not fit on the disk."""

    code = "insufficient_disk"


class DigestMismatchError(DownloadError):
    """A downloaded file is not what the server announced."""

    code = "digest_mismatch"


class PushError(ClientError):
    """An export cannot be brought to the Hugging Face Hub."""

    code = "push_failed"


class HubTokenError(PushError):
    """There is no token of the Hub, or one that it does not know."""

    code = "hub_token_invalid"


class HubForbiddenError(PushError):
    """The token may not write to the repository."""

    code = "hub_forbidden"


class HubUnreachableError(PushError):
    """The Hub does not answer, or asks for time."""

    code = "hub_unreachable"
    is_passing = True


class PublicRepositoryError(PushError):
    """The repository was to be private, and others may read it."""

    code = "repository_is_public"


class HubRefusesError(PushError):
    """The Hub refuses for another reason, and says why."""

    code = "hub_refuses"
