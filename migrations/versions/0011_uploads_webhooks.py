"""Uploaded models, names of calibration files, and webhooks."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them; earlier calibration files have no name."""
    with op.batch_alter_table("uploads") as uploads:
        uploads.add_column(sa.Column("name", sa.String(255)))
    _add_models()
    _add_webhooks()


def downgrade() -> None:
    """Remove them; their files are removed by the next sweep for files that belong to nothing."""
    for table in ("webhook_deliveries", "webhooks", "model_pieces", "model_files", "models"):
        op.drop_table(table)
    with op.batch_alter_table("uploads") as uploads:
        uploads.drop_column("name")


def _add_models() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("phase", sa.String(8), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("parameters", sa.BigInteger()),
        sa.Column("skeleton_key", sa.String(32), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("used_at", _INSTANT, nullable=False),
        sa.CheckConstraint("phase IN ('headers', 'weights', 'ready')", name=op.f("ck_models_phase")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("owner", "name", name=op.f("uq_models_owner_name")),
        sa.UniqueConstraint("skeleton_key", name=op.f("uq_models_skeleton_key")),
    )
    op.create_index(op.f("ix_models_used_at"), "models", ["used_at"])
    op.create_table(
        "model_files",
        sa.Column("model_id", sa.String(40), nullable=False),
        sa.Column("path", sa.String(200), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.BigInteger()),
        sa.CheckConstraint("received >= 0 AND received <= size", name=op.f("ck_model_files_received")),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_model_files_model_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model_id", "path", name=op.f("pk_model_files")),
    )
    op.create_table(
        "model_pieces",
        sa.Column("model_id", sa.String(40), nullable=False),
        sa.Column("path", sa.String(200), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("storage_key", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name=op.f("fk_model_pieces_model_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model_id", "path", "start", name=op.f("pk_model_pieces")),
        sa.UniqueConstraint("storage_key", name=op.f("uq_model_pieces_storage_key")),
    )


def _add_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.String(128), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_index(op.f("ix_webhooks_owner"), "webhooks", ["owner"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("webhook_id", sa.String(40), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("available_at", _INSTANT),
        sa.Column("delivered_at", _INSTANT),
        sa.Column("error", sa.String(200)),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    for column in ("webhook_id", "available_at", "created_at"):
        op.create_index(op.f(f"ix_webhook_deliveries_{column}"), "webhook_deliveries", [column])
