"""Profiles of models, which outlive the jobs that made them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them; existing jobs have none."""
    op.create_table(
        "profiles",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("model_id", sa.String(256), nullable=False),
        sa.Column("calibration", _JSON, nullable=False),
        sa.Column("options", _JSON, nullable=False),
        sa.Column("layer_count", sa.Integer(), nullable=False),
        sa.Column("reachable_ratio", sa.Float(), nullable=False),
        sa.Column("frontier", _JSON, nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("used_at", _INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profiles")),
        sa.UniqueConstraint("owner", "fingerprint", name=op.f("uq_profiles_owner_fingerprint")),
    )
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("profile_id", sa.String(40)))
        jobs.create_foreign_key(op.f("fk_jobs_profile_id"), "profiles", ["profile_id"], ["id"], ondelete="SET NULL")
        jobs.create_index(op.f("ix_jobs_profile_id"), ["profile_id"])


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_index(op.f("ix_jobs_profile_id"))
        jobs.drop_constraint(op.f("fk_jobs_profile_id"), type_="foreignkey")
        jobs.drop_column("profile_id")
    op.drop_table("profiles")
