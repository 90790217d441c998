"""Links that show a finished job to people without a key."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "links",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("with_files", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_links_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_links")),
        sa.UniqueConstraint("job_id", name=op.f("uq_links_job_id")),
    )


def downgrade() -> None:
    """Remove it; no link works any longer."""
    op.drop_table("links")
