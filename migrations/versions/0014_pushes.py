"""Pushes of finished jobs to the Hub, which are jobs that refer to another one."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Add the table of their results."""
    op.create_table(
        "pushes",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("body", _JSON, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_pushes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_pushes")),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("pushes")
