"""Every error that `app` raises on purpose.

AppError
├── InvalidSettingsError            the environment does not describe a service that could run
├── InvalidRequestError             a request that can never be honoured as it is
│   └── IdempotencyKeyReusedError   the same key with another request
├── NotFoundError                   no such thing, or not the caller's
│   ├── JobNotFoundError
│   ├── ArtifactNotFoundError
│   ├── ProfileNotFoundError
│   └── UploadNotFoundError
├── ArtifactExpiredError            the artifact existed; its retention time is over
├── ConflictError                   the job's status does not allow it
│   ├── ReportNotReadyError         the job has not succeeded
│   └── FencedOutError              a worker writes to a job that is no longer its own
├── UnauthenticatedError            the caller has not said who it is, or not proven it
├── PermissionDeniedError           the caller may not do this
├── QuotaExceededError              the caller has used up what it may have
│   ├── RateLimitedError            too many requests in a short time
│   ├── TooManyStreamsError         all event streams of this process, or of the tenant, are in use
│   └── TooManyUploadsError         as many uploads are being received as may be at once
├── BusyError                       this process has no room for the request now (worth retrying)
├── OverQuotaError                  what is asked for is larger than the caller may ever have
├── StorageError                    files cannot be written or read
│   ├── DiskFullError
│   ├── StorageUnavailableError     the artifact store does not answer (worth retrying)
│   └── DataFolderLockedError       another service uses this data folder
├── DatabaseUnavailableError        the database does not answer (worth retrying)
├── QueueError                      the broker does not answer (worth retrying)
├── WorkerLostError                 every attempt ended without a word from the worker
└── JobStalledError                 a job's process lived but made no progress

A message says what is wrong, where, and what to do. `code` is stable: it is stored with a job and returned by the API.
The HTTP status of each class stands in `app/api/problems.py`, nowhere else.
"""

from typing import ClassVar


class AppError(Exception):
    """Base of all errors of the service."""

    code: ClassVar[str] = "app_error"
    retryable: ClassVar[bool] = False


class InvalidSettingsError(AppError):
    """An environment variable is unknown, out of range or contradicts another."""

    code = "invalid_settings"


class InvalidRequestError(AppError):
    """The request can never be honoured as it is.

    Attributes:
        param: the member of the request that is wrong, dotted; None if it is the whole.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class IdempotencyKeyReusedError(InvalidRequestError):
    """An idempotency key came again with another request."""

    code = "idempotency_key_reused"


class NotFoundError(AppError):
    """What was asked for does not exist, or belongs to somebody else."""

    code = "not_found"


class JobNotFoundError(NotFoundError):
    """No job of this caller has that id."""

    code = "job_not_found"


class ArtifactNotFoundError(NotFoundError):
    """The job has no artifact of that name."""

    code = "artifact_not_found"


class UploadNotFoundError(NotFoundError):
    """The caller has uploaded no calibration file of that id."""

    code = "upload_not_found"


class ProfileNotFoundError(NotFoundError):
    """No profile of this caller has that id."""

    code = "profile_not_found"


class ArtifactExpiredError(AppError):
    """The artifact was deleted when its retention time was over."""

    code = "artifact_expired"


class ConflictError(AppError):
    """The status of the job does not allow this."""

    code = "job_state_conflict"


class ReportNotReadyError(ConflictError):
    """Only a job that has succeeded has a report."""

    code = "report_not_ready"


class FencedOutError(ConflictError):
    """A worker tried to write to a job that was taken from it; it must stop at once."""

    code = "fenced_out"


class UnauthenticatedError(AppError):
    """The caller has sent no API key, or one that is not valid."""

    code = "unauthenticated"


class PermissionDeniedError(AppError):
    """The caller may not do this."""

    code = "permission_denied"


class QuotaExceededError(AppError):
    """The caller has used up what it may have."""

    code = "quota_exceeded"
    retryable = True


class RateLimitedError(QuotaExceededError):
    """The caller sends too many requests in a short time.

    Attributes:
        retry_after: seconds after which the next one is accepted.
    """

    code = "rate_limited"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyStreamsError(QuotaExceededError):
    """All event streams that this process has, or has for one tenant, are in use."""

    code = "too_many_streams"


class BusyError(AppError):
    """This process has no room for the request now; the same request may succeed later."""

    code = "busy"
    retryable = True


class TooManyUploadsError(QuotaExceededError):
    """As many uploads are being received as may be at once, of one tenant or of all."""

    code = "too_many_uploads"


class OverQuotaError(AppError):
    """What is asked for is larger than the caller may ever have.

    Attributes:
        param: the member of the request that asks for it; None if it is the whole.
    """

    code = "over_quota"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StorageError(AppError):
    """Files of the service cannot be written or read."""

    code = "storage_error"


class DiskFullError(StorageError):
    """There is no room left where the service keeps its files."""

    code = "disk_full"


class StorageUnavailableError(StorageError):
    """The artifact store does not answer; the same request may succeed later."""

    code = "storage_unavailable"
    retryable = True


class DataFolderLockedError(StorageError):
    """Another running service owns this data folder."""

    code = "data_folder_locked"


class DatabaseUnavailableError(AppError):
    """The database does not answer; the same request may succeed later."""

    code = "database_unavailable"
    retryable = True


class QueueError(AppError):
    """The broker does not answer; jobs are found by polling the database meanwhile."""

    code = "queue_unavailable"
    retryable = True


class WorkerLostError(AppError):
    """Every attempt at a job ended without a word from the worker."""

    code = "worker_lost"


class JobStalledError(AppError):
    """A job's process lived but made no progress."""

    code = "job_stalled"
