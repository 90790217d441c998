"""What was noticed when a job was submitted."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it."""
    json = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("warnings", json, nullable=False, server_default="[]"))


def downgrade() -> None:
    """Remove it."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("warnings")
