"""Every error that `app` raises on purpose.

AppError
├── InvalidSettingsError            the environment does not describe a working configuration
├── InvalidRequestError             a request that can never be accepted as it is
│   └── IdempotencyKeyReusedError   the same key with another request
├── NotFoundError                   does not exist, or belongs to another caller
│   ├── JobNotFoundError
│   ├── ArtifactNotFoundError
│   ├── LinkNotFoundError
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
A class without an HTTP status has that of its base class.
"""

import errno
from http import HTTPStatus

from rocket_core.errors import CodedError

_RETRYABLE_STATUSES = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class AppError(CodedError, code="app_error"):
    """Base of all errors of the service.

    Attributes:
        status: HTTP status of an answer with the error.
    """

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init_subclass__(cls, *, code: str | None = None, status: HTTPStatus | None = None) -> None:
        super().__init_subclass__(code=code, retryable=status in _RETRYABLE_STATUSES)
        cls.status = status or cls.status


class InvalidSettingsError(AppError, code="invalid_settings"):
    """An environment variable is unknown, out of range or contradicts another."""


class InvalidRequestError(AppError, code="invalid_request", status=HTTPStatus.UNPROCESSABLE_ENTITY):
    """The request can never be accepted as it is.

    Attributes:
        param: the invalid member of the request, dotted; None if it is the whole request.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class IdempotencyKeyReusedError(InvalidRequestError, code="idempotency_key_reused"):
    """The idempotency key was already used with another request."""


class NotFoundError(AppError, code="not_found", status=HTTPStatus.NOT_FOUND):
    """The requested object does not exist, or belongs to another caller."""


class JobNotFoundError(NotFoundError, code="job_not_found"):
    """The caller has no job with this id."""


class ArtifactNotFoundError(NotFoundError, code="artifact_not_found"):
    """The job has no artifact with this name."""


class UploadNotFoundError(NotFoundError, code="upload_not_found"):
    """The caller has no calibration file with this id."""


class UploadedModelNotFoundError(NotFoundError, code="model_upload_not_found"):
    """The caller has uploaded no model with this name, or announced no such file."""


class WebhookNotFoundError(NotFoundError, code="webhook_not_found"):
    """The caller has no webhook with this id."""


class LinkNotFoundError(NotFoundError, code="link_not_found"):
    """The job has no link, or no link has this token."""


class ProfileNotFoundError(NotFoundError, code="profile_not_found"):
    """The caller has no profile with this id."""


class ArtifactExpiredError(AppError, code="artifact_expired", status=HTTPStatus.GONE):
    """The artifact was deleted because its retention time is over."""


class ConflictError(AppError, code="job_state_conflict", status=HTTPStatus.CONFLICT):
    """The status of the job does not allow this."""


class ModelConflictError(ConflictError, code="model_upload_conflict"):
    """The upload of a model continues elsewhere, or its name is taken by another model."""


class ModelNotReadyError(ConflictError, code="model_not_ready"):
    """The upload of the model is not complete."""


class ReportNotReadyError(ConflictError, code="report_not_ready"):
    """Only a job that has succeeded has a report."""


class FencedOutError(ConflictError, code="fenced_out"):
    """A worker tried to write to a job that was taken from it; it must stop at once."""


class UnauthenticatedError(AppError, code="unauthenticated", status=HTTPStatus.UNAUTHORIZED):
    """The caller's API key is missing or not valid."""


class PermissionDeniedError(AppError, code="permission_denied", status=HTTPStatus.FORBIDDEN):
    """The caller may not do this."""


class QuotaExceededError(AppError, code="quota_exceeded", status=HTTPStatus.TOO_MANY_REQUESTS):
    """The caller's quota is used up."""


class RateLimitedError(QuotaExceededError, code="rate_limited"):
    """The caller exceeds the rate limit.

    Attributes:
        retry_after: seconds after which the next request is accepted.
    """

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManyStreamsError(QuotaExceededError, code="too_many_streams"):
    """All event streams of this process, or of the caller's tenant, are in use."""


class BusyError(AppError, code="busy", status=HTTPStatus.SERVICE_UNAVAILABLE):
    """This process has no capacity for the request now; the same request may succeed later."""


class TooManyUploadsError(QuotaExceededError, code="too_many_uploads"):
    """The limit on concurrent uploads, per tenant or in total, is reached."""


class OverQuotaError(AppError, code="over_quota", status=HTTPStatus.UNPROCESSABLE_ENTITY):
    """The request exceeds what the caller may ever have.

    Attributes:
        param: the member of the request that exceeds the limit; None if it is the whole request.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StorageError(AppError, code="storage_error"):
    """Files of the service cannot be written or read."""


class DiskFullError(StorageError, code="disk_full", status=HTTPStatus.INSUFFICIENT_STORAGE):
    """The disk where the service stores its files is full."""


class StorageUnavailableError(StorageError, code="storage_unavailable", status=HTTPStatus.SERVICE_UNAVAILABLE):
    """The artifact store does not answer; the same request may succeed later."""


class DataFolderLockedError(StorageError, code="data_folder_locked"):
    """Another running service owns this data folder."""


class DatabaseUnavailableError(AppError, code="database_unavailable", status=HTTPStatus.SERVICE_UNAVAILABLE):
    """The database does not answer; the same request may succeed later."""


class QueueError(AppError, code="queue_unavailable", status=HTTPStatus.SERVICE_UNAVAILABLE):
    """The broker does not answer; meanwhile, workers find jobs by polling the database."""


class WorkerLostError(AppError, code="worker_lost"):
    """The worker stopped reporting in every attempt at the job."""


class JobStalledError(AppError, code="job_stalled"):
    """A job's process was running but made no progress."""


def is_disk_full(error: OSError) -> bool:
    """Return whether an operating system error means that the disk, or the user's quota on it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
