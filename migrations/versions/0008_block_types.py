"""Layers in block types of llama.cpp, which have no bits, size of groups and bits of scales."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_CODES = "bits IS NOT NULL AND group_size IS NOT NULL AND scale_bits IS NOT NULL"
_CONSTRAINT = (
    "(kind IN ('dense', 'quantized', 'entropy_coded')) = (rank IS NULL AND nnz IS NULL) AND (kind = 'quantized') = ({})"
)
_BEFORE = _CONSTRAINT.format(_CODES)
_AFTER = _CONSTRAINT.format(f"{_CODES} OR block_type IS NOT NULL")


def upgrade() -> None:
    """Add them."""
    with op.batch_alter_table("allocations") as allocations:
        allocations.add_column(sa.Column("block_type", sa.String(16)))
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), _AFTER)


def downgrade() -> None:
    """Remove them; the choices of such layers are lost."""
    op.execute("DELETE FROM allocations WHERE block_type IS NOT NULL")
    with op.batch_alter_table("allocations") as allocations:
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), _BEFORE)
        allocations.drop_column("block_type")
