"""Evaluations of finished jobs, which are jobs that refer to another one."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them; existing jobs refer to none."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("source_job_id", sa.String(40)))
        jobs.create_foreign_key(op.f("fk_jobs_source_job_id"), "jobs", ["source_job_id"], ["id"], ondelete="SET NULL")
        jobs.create_index(op.f("ix_jobs_source_job_id"), ["source_job_id"])
    op.create_table(
        "evaluations",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_evaluations_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_evaluations")),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("evaluations")
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_index(op.f("ix_jobs_source_job_id"))
        jobs.drop_constraint(op.f("fk_jobs_source_job_id"), type_="foreignkey")
        jobs.drop_column("source_job_id")
