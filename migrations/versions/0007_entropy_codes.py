"""Layers of entropy-coded integers."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_CONSTRAINT = (
    "(kind IN ({})) = (rank IS NULL AND nnz IS NULL)"
    " AND (kind = 'quantized') = (bits IS NOT NULL AND group_size IS NOT NULL AND scale_bits IS NOT NULL)"
)
_BEFORE = _CONSTRAINT.format("'dense', 'quantized'")
_AFTER = _CONSTRAINT.format("'dense', 'quantized', 'entropy_coded'")


def upgrade() -> None:
    """Allow them."""
    _replace(_AFTER)


def downgrade() -> None:
    """Refuse them; the choices of such layers are lost."""
    op.execute("DELETE FROM allocations WHERE kind = 'entropy_coded'")
    _replace(_BEFORE)


def _replace(constraint: str) -> None:
    with op.batch_alter_table("allocations") as allocations:
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), constraint)
