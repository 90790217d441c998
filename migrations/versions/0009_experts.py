"""Calibration tokens that were routed to an expert of a mixture."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    with op.batch_alter_table("layer_profiles") as profiles:
        profiles.add_column(sa.Column("routed_tokens", sa.BigInteger))


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("layer_profiles") as profiles:
        profiles.drop_column("routed_tokens")
