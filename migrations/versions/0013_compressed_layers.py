"""How many layers of a running job are compressed."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("compressed_layers", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove it."""
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("compressed_layers")
