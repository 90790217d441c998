"""Candidates of several kinds: shared dictionaries, and losses in addition to errors."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Add the columns of further kinds of candidates; existing rows share nothing."""
    with op.batch_alter_table("layer_profiles") as profiles:
        profiles.add_column(sa.Column("shared", _JSON, nullable=False, server_default="[]"))
    with op.batch_alter_table("allocations") as allocations:
        allocations.add_column(sa.Column("dictionary", sa.String(512)))
        allocations.add_column(sa.Column("loss", sa.Float()))


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("allocations") as allocations:
        for column in ("loss", "dictionary"):
            allocations.drop_column(column)
    with op.batch_alter_table("layer_profiles") as profiles:
        profiles.drop_column("shared")
