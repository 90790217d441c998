"""Tenants with keys and quotas, uploads, queues, encrypted Hub tokens, request ids, the database's identity."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them; existing jobs are assigned to the CPU queue."""
    _create_tenants()
    _create_uploads()
    _create_identity()
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("queue", sa.String(16), nullable=False, server_default="cpu"))
        jobs.add_column(sa.Column("hub_token", sa.Text()))
        jobs.add_column(sa.Column("request_id", sa.String(64)))
        jobs.add_column(sa.Column("expires_at", _INSTANT))
        jobs.add_column(sa.Column("progressed_at", _INSTANT))
        jobs.create_check_constraint(op.f("ck_jobs_queue"), "queue IN ('cpu', 'gpu')")
    # Derived from the job's artifacts.
    op.execute(
        "UPDATE jobs SET expires_at ="
        " (SELECT max(artifacts.expires_at) FROM artifacts WHERE artifacts.job_id = jobs.id)"
    )


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_constraint(op.f("ck_jobs_queue"), type_="check")
        for column in ("progressed_at", "expires_at", "request_id", "hub_token", "queue"):
            jobs.drop_column(column)
    for table in ("identity", "uploads", "api_keys", "tenants"):
        op.drop_table(table)


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("max_active_jobs", sa.Integer()),
        sa.Column("max_stored_bytes", sa.BigInteger()),
        sa.Column("max_model_bytes", sa.BigInteger()),
        sa.Column("max_calibration_tokens", sa.BigInteger()),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(64), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT),
        sa.Column("revoked_at", _INSTANT),
        sa.Column("last_used_at", _INSTANT),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_api_keys_tenant"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("storage_key", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("suffix", sa.String(8), nullable=False),
        sa.Column("documents", sa.Integer(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("owner", "id", name=op.f("pk_uploads")),
        sa.UniqueConstraint("storage_key", name=op.f("uq_uploads_storage_key")),
    )


def _create_identity() -> None:
    identity = op.create_table(
        "identity",
        sa.Column("id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_identity")),
    )
    op.bulk_insert(identity, [{"id": secrets.token_hex(16)}])
