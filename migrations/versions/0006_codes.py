"""Layers of integer codes: bits of codes and scales, and the size of groups."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_CODES = ("bits", "group_size", "scale_bits")
_BEFORE = "(kind = 'dense') = (rank IS NULL AND nnz IS NULL)"
_AFTER = (
    "(kind IN ('dense', 'quantized')) = (rank IS NULL AND nnz IS NULL)"
    " AND (kind = 'quantized') = (bits IS NOT NULL AND group_size IS NOT NULL AND scale_bits IS NOT NULL)"
)


def upgrade() -> None:
    """Add them."""
    with op.batch_alter_table("allocations") as allocations:
        for name in _CODES:
            allocations.add_column(sa.Column(name, sa.Integer()))
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), _AFTER)


def downgrade() -> None:
    """Remove them; the choices of quantized layers are lost."""
    op.execute("DELETE FROM allocations WHERE kind = 'quantized'")
    with op.batch_alter_table("allocations") as allocations:
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), _BEFORE)
        for name in reversed(_CODES):
            allocations.drop_column(name)
