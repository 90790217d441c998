"""The tables.

jobs ─┬─ job_events         events, numbered without gaps
      ├─ layer_profiles     one row per layer: its candidates
      ├─ allocations        one row per layer: the candidate chosen
      ├─ reports            the allocation report, once the job has succeeded
      ├─ evaluations        the result of a job that evaluates an earlier one's artifact
      ├─ pushes             the result of a job that pushes an earlier one's artifact to the Hub
      ├─ artifacts          files to download, by name
      ├─ links              who has one sees the job without a key
      ├─ outbox             jobs to notify the workers of
      └─ idempotency_keys   which request created the job

profiles                    what is known of a model before a ratio is chosen; jobs refer to theirs
tenants ── api_keys         who has access, as which tenant
           └─ sessions      users signed in to the pages with a key
audit_events                who did what; append-only
uploads                     calibration files of a tenant
models ── model_files       models of a tenant: the files that were announced
          └─ model_pieces   what has arrived of them
webhooks ─ webhook_deliveries  addresses that a tenant's events are sent to; what is sent to them
identity                    identifies this database

Rows below a job are deleted with it. Enumerations are text with a check, so that both databases treat them alike.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from app.shared.database import UtcDateTime

LOCAL_OWNER = "local"
"""The one tenant of a service without API keys."""

_Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
# SQLite autoincrements only a plain INTEGER key.
_Serial = BigInteger().with_variant(Integer, "sqlite")
_JOB_ID = String(40)


class Base(DeclarativeBase):
    """Base of the tables; names every constraint, so that a migration can alter it on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: _Json, list[dict[str, Any]]: _Json}  # noqa: RUF012


def _job_key(*, primary: bool = False) -> Mapped[str]:
    # Without an index, deleting a job would scan the whole table.
    return mapped_column(
        _JOB_ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=primary, index=None if primary else True
    )


class Job(Base):
    """A job that a user submitted.

    Attributes:
        id: increases with the time of creation, so that it is also the order of the list.
        owner: the tenant.
        request: the job's request, a `JobRequest`.
        status: see `lifecycle`, the only place that changes it.
        attempt: number of attempts so far; not counting those that ended with an orderly release.
        fence: token of the attempt that may write; None if the job is not held.
        claimed_by: the worker that holds the job.
        lease_until: when the worker is considered dead; None if the job is not held.
        available_at: earliest time to claim it.
        rung_at: when the workers were last notified of it.
        last_event: number of the newest event.
        work_key: name of the checkpoint folder, which a retry takes over.
        retry_of: the job that this one retries.
        error: why it failed, a `JobError`.
        result: what it achieved, a `JobResult`.
        queue: which workers run it.
        hub_token: token for the Hub that came with the job, encrypted; deleted when the job ends.
        request_id: id of the request that created it, as in the log.
        expires_at: when its artifacts are deleted; None unless it has succeeded.
        progressed_at: when its process last made progress; a later attempt that is catching up changes only this.
        profile_id: the profile that it made or used; None before it has one, and after that is deleted.
        source_job_id: the earlier job whose artifact it works on; None if it works on a model, and after that job is
            deleted.
        warnings: what its client should know, noticed when it was submitted.
        compressed_layers: number of the first layers, in the order of the model, that are compressed.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(
            "status IN ('queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled')", name="status"
        ),
        CheckConstraint("attempt >= 0 AND attempt <= max_attempts", name="attempt"),
        CheckConstraint("progress >= 0 AND progress <= 1", name="progress"),
        CheckConstraint("(status IN ('running', 'cancelling')) = (fence IS NOT NULL)", name="fence"),
        CheckConstraint("(fence IS NULL) = (lease_until IS NULL)", name="lease"),
        Index("ix_jobs_owner_id", "owner", "id"),
        CheckConstraint("queue IN ('cpu', 'gpu')", name="queue"),
        Index("ix_jobs_status_available_at", "status", "available_at"),
    )

    id: Mapped[str] = mapped_column(_JOB_ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(64), default=LOCAL_OWNER, server_default=LOCAL_OWNER)
    request: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16))
    stage: Mapped[str | None] = mapped_column(String(32))
    progress: Mapped[float] = mapped_column(Float, default=0.0)
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    estimated_finish_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int]
    fence: Mapped[str | None] = mapped_column(String(32))
    claimed_by: Mapped[str | None] = mapped_column(String(128))
    lease_until: Mapped[datetime | None]
    available_at: Mapped[datetime]
    rung_at: Mapped[datetime | None]
    last_event: Mapped[int] = mapped_column(Integer, default=0)
    work_key: Mapped[str | None] = mapped_column(String(32), unique=True)
    retry_of: Mapped[str | None] = mapped_column(_JOB_ID, ForeignKey("jobs.id", ondelete="SET NULL"), unique=True)
    error: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    result: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    queue: Mapped[str] = mapped_column(String(16), default="cpu", server_default="cpu")
    hub_token: Mapped[str | None] = mapped_column(Text)
    request_id: Mapped[str | None] = mapped_column(String(64))
    expires_at: Mapped[datetime | None]
    progressed_at: Mapped[datetime | None]
    profile_id: Mapped[str | None] = mapped_column(_JOB_ID, ForeignKey("profiles.id", ondelete="SET NULL"), index=True)
    source_job_id: Mapped[str | None] = mapped_column(_JOB_ID, ForeignKey("jobs.id", ondelete="SET NULL"), index=True)
    warnings: Mapped[list[str]] = mapped_column(_Json, default=list, server_default="[]")
    compressed_layers: Mapped[int] = mapped_column(Integer, default=0, server_default="0")


class JobEvent(Base):
    """An event of a job; `sequence` counts from 1 without gaps."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = _job_key(primary=True)
    sequence: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    created_at: Mapped[datetime]
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(32))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]]


class LayerProfileRow(Base):
    """The candidates of one layer, written once.

    The candidates are one JSON value instead of a table: they never change, and API, knapsack and frontier only read
    all candidates of a layer together. `position` is the layer's index in the model.
    """

    __tablename__ = "layer_profiles"

    job_id: Mapped[str] = _job_key(primary=True)
    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    position: Mapped[int]
    d_in: Mapped[int]
    d_out: Mapped[int]
    input_group: Mapped[str] = mapped_column(String(512))
    tokens: Mapped[int] = mapped_column(BigInteger)
    routed_tokens: Mapped[int | None] = mapped_column(BigInteger)
    candidates: Mapped[list[dict[str, Any]]]
    shared: Mapped[list[dict[str, Any]]] = mapped_column(server_default="[]")
    created_at: Mapped[datetime]


class AllocationRow(Base):
    """The candidate that the knapsack chose for one layer; `rank` and `nnz` are null where it is dense or of codes.

    A sparse layer has no rank. `dictionary` names the layer whose dictionary it shares. `bits` and the two columns
    after it are null unless the layer is quantized, or has low-rank factors of codes; they are null as well where it is
    quantized for llama.cpp, to a `block_type`.
    """

    __tablename__ = "allocations"
    __table_args__ = (
        CheckConstraint(
            "(kind IN ('dense', 'quantized', 'entropy_coded')) = (rank IS NULL AND nnz IS NULL)"
            " AND (kind = 'low_rank' AND block_type IS NULL"
            " OR (kind = 'quantized') = (bits IS NOT NULL AND group_size IS NOT NULL AND scale_bits IS NOT NULL"
            " OR block_type IS NOT NULL))",
            name="kind",
        ),
    )

    job_id: Mapped[str] = _job_key(primary=True)
    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    position: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int | None]
    nnz: Mapped[int | None] = mapped_column(BigInteger)
    dictionary: Mapped[str | None] = mapped_column(String(512))
    bits: Mapped[int | None]
    group_size: Mapped[int | None]
    scale_bits: Mapped[int | None]
    block_type: Mapped[str | None] = mapped_column(String(16))
    kept_parameters: Mapped[int] = mapped_column(BigInteger)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
    reconstruction_error: Mapped[float] = mapped_column(Float)
    weight_error: Mapped[float] = mapped_column(Float)
    loss: Mapped[float | None] = mapped_column(Float)
    created_at: Mapped[datetime]


class _ReportColumns:
    """Columns of what a job has found, written once."""

    job_id: Mapped[str] = _job_key(primary=True)
    body: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ReportRow(_ReportColumns, Base):
    """The report of a job that has succeeded, a `CompressionReport`."""

    __tablename__ = "reports"


class EvaluationRow(_ReportColumns, Base):
    """The result of a job that evaluates an earlier one's artifact, an `EvaluationReport`."""

    __tablename__ = "evaluations"


class PushRow(_ReportColumns, Base):
    """The result of a job that pushes an earlier one's artifact to the Hub, a `PushReport`."""

    __tablename__ = "pushes"


class Artifact(Base):
    """A file to download; `storage_key` is null once it has expired."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("storage_key"), Index(None, "expires_at"))

    job_id: Mapped[str] = _job_key(primary=True)
    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    storage_key: Mapped[str | None] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    media_type: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class Link(Base):
    """A link that shows a job without a key, with a token `rl_<id>_<secret>` of which only the hash is stored.

    Attributes:
        secret_sha256: SHA-256 of the secret, hexadecimal.
        with_files: whether it also gives the files of the job.
    """

    __tablename__ = "links"
    __table_args__ = (UniqueConstraint("job_id"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    job_id: Mapped[str] = mapped_column(_JOB_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    secret_sha256: Mapped[str] = mapped_column(String(64))
    with_files: Mapped[bool]
    created_at: Mapped[datetime]


class OutboxRow(Base):
    """A job to notify the workers of; deleted once the broker has the message."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    job_id: Mapped[str] = _job_key()
    created_at: Mapped[datetime]


class IdempotencyKey(Base):
    """The request that a tenant sent with a key, and the job that it created."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (Index(None, "expires_at"),)

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = _job_key()
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class Profile(Base):
    """The profile of a model: what is known before a ratio is chosen.

    `frontier` and `body` are large and are loaded on access.

    Attributes:
        id: increases with the time of creation.
        fingerprint: hash of what it depends on; workers cache its statistics under the same hash.
        model_id: the model, as named by the job that made it.
        calibration: a `CalibrationRequest`.
        options: the `JobOptions` of that job, including some that do not affect the profile.
        reachable_ratio: the largest reachable ratio.
        frontier: `SizePoint`s, by increasing ratio.
        body: a `ModelProfile`.
        used_at: when a job last made or used it.
    """

    __tablename__ = "profiles"
    __table_args__ = (UniqueConstraint("owner", "fingerprint"),)

    id: Mapped[str] = mapped_column(_JOB_ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    fingerprint: Mapped[str] = mapped_column(String(64))
    model_id: Mapped[str] = mapped_column(String(256))
    calibration: Mapped[dict[str, Any]]
    options: Mapped[dict[str, Any]]
    layer_count: Mapped[int]
    reachable_ratio: Mapped[float] = mapped_column(Float)
    frontier: Mapped[list[dict[str, Any]]] = mapped_column(deferred=True)
    body: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]


class Identity(Base):
    """The database's identity: one row, created with the table. Stores are bound to it, wherever the database moves."""

    __tablename__ = "identity"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)


class Tenant(Base):
    """An owner of jobs. Quotas that are null are those of the settings.

    Attributes:
        next_delivery_at: earliest start of its next delivery to a webhook, as it has one at a time: when the last one
            ended, or while one is sent, when that counts as lost.
    """

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]
    max_active_jobs: Mapped[int | None]
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_model_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_calibration_tokens: Mapped[int | None] = mapped_column(BigInteger)
    next_delivery_at: Mapped[datetime | None]


class ApiKey(Base):
    """An API key `rk_<id>_<secret>`, of which only the secret's hash is stored.

    Attributes:
        label: its owner's name for it.
        secret_sha256: SHA-256 of the secret, hexadecimal.
        scopes: its scopes, separated by blanks.
        made_with: the key that it was created with, and ends with; null if the operator created it.
    """

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), ForeignKey("tenants.name", ondelete="CASCADE"), index=True)
    label: Mapped[str] = mapped_column(String(64))
    secret_sha256: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    made_with: Mapped[str | None] = mapped_column(String(16), ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)


class Upload(Base):
    """A calibration file of a tenant, identified by its content.

    Attributes:
        id: the first 32 digits of its SHA-256.
        suffix: how it is read, `.jsonl` or `.txt`.
        documents: number of documents.
        name: name of the file when it was first uploaded; null if the client did not send it.
    """

    __tablename__ = "uploads"
    __table_args__ = (UniqueConstraint("storage_key"),)

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    storage_key: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    suffix: Mapped[str] = mapped_column(String(8))
    documents: Mapped[int]
    name: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[datetime]


class UploadedModel(Base):
    """A model that a tenant uploads, or has uploaded.

    Attributes:
        id: increases with the time of creation; a model uploaded again under the same name has another one.
        owner: the tenant.
        name: its name; jobs refer to it as `upload/NAME`.
        phase: `headers` until its headers are accepted, `weights` until every byte has arrived, then `ready`.
        size: bytes of all files.
        parameters: number of parameters; null until its headers are accepted.
        skeleton_key: key of the work folder that holds its headers on each machine that has judged it.
        used_at: when a piece of it arrived, or a job was created with it.
    """

    __tablename__ = "models"
    __table_args__ = (
        CheckConstraint("phase IN ('headers', 'weights', 'ready')", name="phase"),
        UniqueConstraint("owner", "name"),
        Index(None, "used_at"),
    )

    id: Mapped[str] = mapped_column(_JOB_ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(96))
    phase: Mapped[str] = mapped_column(String(8))
    size: Mapped[int] = mapped_column(BigInteger)
    parameters: Mapped[int | None] = mapped_column(BigInteger)
    skeleton_key: Mapped[str] = mapped_column(String(32), unique=True)
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]


class ModelFile(Base):
    """A file of an uploaded model.

    Attributes:
        path: its path in the model's folder.
        size: its size in bytes, as announced.
        received: number of bytes that have arrived, from its start.
        head: number of its first bytes that are needed to judge the model; null until they show it themselves.
    """

    __tablename__ = "model_files"
    __table_args__ = (CheckConstraint("received >= 0 AND received <= size", name="received"),)

    model_id: Mapped[str] = mapped_column(_JOB_ID, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    path: Mapped[str] = mapped_column(String(200), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    received: Mapped[int] = mapped_column(BigInteger, default=0)
    head: Mapped[int | None] = mapped_column(BigInteger)


class ModelPiece(Base):
    """Consecutive bytes of an uploaded model's file, stored under a key."""

    __tablename__ = "model_pieces"
    __table_args__ = (UniqueConstraint("storage_key"),)

    model_id: Mapped[str] = mapped_column(_JOB_ID, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    path: Mapped[str] = mapped_column(String(200), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    size: Mapped[int] = mapped_column(BigInteger)
    storage_key: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64))


class Webhook(Base):
    """An address that events of a tenant's jobs are sent to.

    Attributes:
        events: the events, separated by blanks.
        secret: key of the signatures, encrypted.
        next_attempt_at: earliest time of the next delivery to it; null for at once.
        slow_failures: number of deliveries in a row that have failed and taken long.
    """

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(_JOB_ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(64), index=True)
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[str] = mapped_column(String(128))
    secret: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    next_attempt_at: Mapped[datetime | None]
    slow_failures: Mapped[int] = mapped_column(Integer, default=0)


class WebhookDelivery(Base):
    """An event to send to a webhook, or one that was sent.

    Attributes:
        event: what happened, such as `job.succeeded`.
        body: what is sent.
        attempt: number of attempts so far.
        available_at: earliest time of the next attempt; null once it was delivered or given up.
        delivered_at: when the receiver accepted it.
        error: why the last attempt failed.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index(None, "webhook_id", "available_at"), Index(None, "created_at"))

    id: Mapped[str] = mapped_column(_JOB_ID, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(_JOB_ID, ForeignKey("webhooks.id", ondelete="CASCADE"))
    event: Mapped[str] = mapped_column(String(32))
    body: Mapped[dict[str, Any]]
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[datetime]
    available_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    error: Mapped[str | None] = mapped_column(String(200))


class BrowserSession(Base):
    """A user's session of the pages, with a token `rs_<id>_<secret>` of which only the secret's hash is stored.

    Attributes:
        key_id: the API key that the user signed in with; the session ends with it.
        secret_sha256: SHA-256 of the secret, hexadecimal.
    """

    __tablename__ = "sessions"
    __table_args__ = (Index(None, "expires_at"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(16), ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)
    secret_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class AuditEvent(Base):
    """A recorded action. Triggers in the database refuse to change or delete a row.

    Attributes:
        tenant: the tenant concerned; null if it concerns no particular tenant.
        actor: id of the API key, or `local`, `unknown`, `worker` or `admin`.
        address: IP address of the client.
        action: an `Action` of `app.shared.repositories.audit`.
        subject: id of the object of the action.
        request_id: id of the request, as in the log.
        outcome: `success` or `failure`.
        detail: details, without secrets and without text that a client chose.
    """

    __tablename__ = "audit_events"
    __table_args__ = (
        CheckConstraint("outcome IN ('success', 'failure')", name="outcome"),
        Index("ix_audit_events_tenant_id", "tenant", "id"),
        Index(None, "at"),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    at: Mapped[datetime]
    tenant: Mapped[str | None] = mapped_column(String(64))
    actor: Mapped[str] = mapped_column(String(16))
    address: Mapped[str | None] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(8))
    detail: Mapped[dict[str, Any]]
