"""Jobs and everything that belongs to them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Spelled out rather than imported: a revision must not change with the models.
_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
_INSTANT = sa.DateTime(timezone=True)
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create all tables."""
    _create_jobs()
    _create_progress()
    _create_layers()
    _create_results()
    _create_submission()


def downgrade() -> None:
    """Drop all tables."""
    for table in (
        "idempotency_keys",
        "outbox",
        "artifacts",
        "reports",
        "allocations",
        "layer_profiles",
        "job_events",
        "jobs",
    ):
        op.drop_table(table)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False, server_default="local"),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(32)),
        sa.Column("progress", sa.Float(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("started_at", _INSTANT),
        sa.Column("finished_at", _INSTANT),
        sa.Column("estimated_finish_at", _INSTANT),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("fence", sa.String(32)),
        sa.Column("claimed_by", sa.String(128)),
        sa.Column("lease_until", _INSTANT),
        sa.Column("available_at", _INSTANT, nullable=False),
        sa.Column("rung_at", _INSTANT),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("work_key", sa.String(32)),
        sa.Column("retry_of", sa.String(40)),
        sa.Column("error", _JSON),
        sa.Column("result", _JSON),
        sa.CheckConstraint(
            "status IN ('queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_jobs_status"),
        ),
        sa.CheckConstraint("attempt >= 0 AND attempt <= max_attempts", name=op.f("ck_jobs_attempt")),
        sa.CheckConstraint("progress >= 0 AND progress <= 1", name=op.f("ck_jobs_progress")),
        sa.CheckConstraint("(status IN ('running', 'cancelling')) = (fence IS NOT NULL)", name=op.f("ck_jobs_fence")),
        sa.CheckConstraint("(fence IS NULL) = (lease_until IS NULL)", name=op.f("ck_jobs_lease")),
        sa.ForeignKeyConstraint(["retry_of"], ["jobs.id"], name=op.f("fk_jobs_retry_of"), ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("retry_of", name=op.f("uq_jobs_retry_of")),
        sa.UniqueConstraint("work_key", name=op.f("uq_jobs_work_key")),
    )
    op.create_index("ix_jobs_owner_id", "jobs", ["owner", "id"])
    op.create_index("ix_jobs_status_available_at", "jobs", ["status", "available_at"])


def _create_progress() -> None:
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", _JSON, nullable=False),
        _belongs_to_job("job_events"),
        sa.PrimaryKeyConstraint("job_id", "sequence", name=op.f("pk_job_events")),
    )


def _create_layers() -> None:
    op.create_table(
        "layer_profiles",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("d_in", sa.Integer(), nullable=False),
        sa.Column("d_out", sa.Integer(), nullable=False),
        sa.Column("input_group", sa.String(512), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("candidates", _JSON, nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        _belongs_to_job("layer_profiles"),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_layer_profiles")),
    )
    op.create_table(
        "allocations",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("rank", sa.Integer()),
        sa.Column("nnz", sa.BigInteger()),
        sa.Column("kept_parameters", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reconstruction_error", sa.Float(), nullable=False),
        sa.Column("weight_error", sa.Float(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.CheckConstraint("(kind = 'dense') = (rank IS NULL AND nnz IS NULL)", name=op.f("ck_allocations_kind")),
        _belongs_to_job("allocations"),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_allocations")),
    )


def _create_results() -> None:
    op.create_table(
        "reports",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        _belongs_to_job("reports"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_reports")),
    )
    op.create_table(
        "artifacts",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(512), nullable=False),
        sa.Column("storage_key", sa.String(64)),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("media_type", sa.String(128), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT, nullable=False),
        _belongs_to_job("artifacts"),
        sa.PrimaryKeyConstraint("job_id", "name", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("storage_key", name=op.f("uq_artifacts_storage_key")),
    )
    op.create_index("ix_artifacts_expires_at", "artifacts", ["expires_at"])


def _create_submission() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", _SERIAL, nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        _belongs_to_job("outbox"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_job_id", "outbox", ["job_id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT, nullable=False),
        _belongs_to_job("idempotency_keys"),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"])


def _belongs_to_job(table: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_job_id")
    return sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=name, ondelete="CASCADE")
