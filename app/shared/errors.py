"""Every error that `app` raises on purpose.

AppError
├── InvalidSettingsError            the environment does not describe a working configuration
├── InvalidRequestError             a request that can never be accepted as it is
│   └── IdempotencyKeyReusedError   the same key with another request
├── NotFoundError                   does not exist, or belongs to another caller
│   ├── JobNotFoundError
│   ├── ArtifactNotFoundError
│   ├── ProfileNotFoundError
│   ├── UploadNotFoundError
│   ├── UploadedModelNotFoundError
│   └── WebhookNotFoundError
├── ArtifactExpiredError            the artifact existed; its retention time is over
├── ConflictError                   the job's status does not allow it
│   ├── ModelConflictError          the upload of a model continues elsewhere, or its name is taken
│   ├── ModelNotReadyError          the upload of the model is not complete
│   ├── ReportNotReadyError         the job has not succeeded
│   └── FencedOutError              a worker writes to a job that it no longer holds
├── UnauthenticatedError            the caller has no valid credentials
├── PermissionDeniedError           the caller may not do this
├── QuotaExceededError              the caller's quota is used up
│   ├── RateLimitedError            too many requests in a short time
│   ├── TooManyStreamsError         all event streams of this process, or of the tenant, are in use
│   └── TooManyUploadsError         the limit on concurrent uploads is reached
├── BusyError                       this process has no capacity for the request now (worth retrying)
├── OverQuotaError                  the request exceeds what the caller may ever have
├── StorageError                    files cannot be written or read
│   ├── DiskFullError
│   ├── StorageUnavailableError     the artifact store does not answer (worth retrying)
│   └── DataFolderLockedError       another service uses this data folder
├── DatabaseUnavailableError        the database does not answer (worth retrying)
├── QueueError                      the broker does not answer (worth retrying)
├── WorkerLostError                 every attempt ended with the worker no longer reporting
└── JobStalledError                 a job's process was running but made no progress

A message says what is wrong, where, and what to do. `code` is stable: it is stored with a job and returned by the API.
The HTTP status of each class is in `app/api/problems.py`, nowhere else.
"""

import errno
from typing import ClassVar


class AppError(Exception):
    """Base of all errors of the service."""

    code: ClassVar[str] = "app_error"
    retryable: ClassVar[bool] = False


class InvalidSettingsError(AppError):
    """An environment variable is unknown, out of range or contradicts another."""

    code = "invalid_settings"


class InvalidRequestError(AppError):
    """The request can never be accepted as it is.

    Attributes:
        param: the invalid member of the request, dotted; None if it is the whole request.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class IdempotencyKeyReusedError(InvalidRequestError):
    """The idempotency key was already used with another request."""

    code = "idempotency_key_reused"


class NotFoundError(AppError):
    """The requested object does not exist, or belongs to another caller."""

    code = "not_found"


class JobNotFoundError(NotFoundError):
    """The caller has no job with this id."""

    code = "job_not_found"


class ArtifactNotFoundError(NotFoundError):
    """The job has no artifact with this name."""

    code = "artifact_not_found"


class UploadNotFoundError(NotFoundError):
    """The caller has no calibration file with this id."""

    code = "upload_not_found"


class UploadedModelNotFoundError(NotFoundError):
    """The caller has uploaded no model with this name, or announced no such file."""

    code = "model_upload_not_found"


class WebhookNotFoundError(NotFoundError):
    """The caller has no webhook with this id."""

    code = "webhook_not_found"


class ProfileNotFoundError(NotFoundError):
    """The caller has no profile with this id."""

    code = "profile_not_found"


class ArtifactExpiredError(AppError):
    """The artifact was deleted because its retention time is over."""

    code = "artifact_expired"


class ConflictError(AppError):
    """The status of the job does not allow this."""

    code = "job_state_conflict"


class ModelConflictError(ConflictError):
    """The upload of a model continues elsewhere, or its name is taken by another model."""

    code = "model_upload_conflict"


class ModelNotReadyError(ConflictError):
    """The upload of the model is not complete."""

    code = "model_not_ready"


class ReportNotReadyError(ConflictError):
    """Only a job that has succeeded has a report."""

    code = "report_not_ready"


class FencedOutError(ConflictError):
    """A worker tried to write to a job that was taken from it; it must stop at once."""

    code = "fenced_out"


class UnauthenticatedError(AppError):
    """The caller's API key is missing or not valid."""

    code = "unauthenticated"


class PermissionDeniedError(AppError):
    """The caller may not do this."""

    code = "permission_denied"


class QuotaExceededError(AppError):
    """The caller's quota is used up."""

    code = "quota_exceeded"
    retryable = True


class RateLimitedError(QuotaExceededError):
    """The caller exceeds the rate limit.

    Attributes:
        retry_after: seconds after which the next request is accepted.
    """

    code = "rate_limited"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyStreamsError(QuotaExceededError):
    """All event streams of this process, or of the caller's tenant, are in use."""

    code = "too_many_streams"


class BusyError(AppError):
    """This process has no capacity for the request now; the same request may succeed later."""

    code = "busy"
    retryable = True


class TooManyUploadsError(QuotaExceededError):
    """The limit on concurrent uploads, per tenant or in total, is reached."""

    code = "too_many_uploads"


class OverQuotaError(AppError):
    """The request exceeds what the caller may ever have.

    Attributes:
        param: the member of the request that exceeds the limit; None if it is the whole request.
    """

    code = "over_quota"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StorageError(AppError):
    """Files of the service cannot be written or read."""

    code = "storage_error"


class DiskFullError(StorageError):
    """The disk where the service stores its files is full."""

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
    """The broker does not answer; meanwhile, workers find jobs by polling the database."""

    code = "queue_unavailable"
    retryable = True


class WorkerLostError(AppError):
    """The worker stopped reporting in every attempt at the job."""

    code = "worker_lost"


class JobStalledError(AppError):
    """A job's process was running but made no progress."""

    code = "job_stalled"


def is_disk_full(error: OSError) -> bool:
    """Return whether an operating system error means that the disk, or the user's quota on it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
