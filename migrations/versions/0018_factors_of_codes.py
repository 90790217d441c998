"""Low-rank layers with factors of codes, which have bits, size of groups and bits of scales."""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NUMBERS = "(kind IN ('dense', 'quantized', 'entropy_coded')) = (rank IS NULL AND nnz IS NULL)"
_CODES = (
    "(kind = 'quantized') = (bits IS NOT NULL AND group_size IS NOT NULL AND scale_bits IS NOT NULL"
    " OR block_type IS NOT NULL)"
)
_BEFORE = f"{_NUMBERS} AND {_CODES}"
_AFTER = f"{_NUMBERS} AND (kind = 'low_rank' AND block_type IS NULL OR {_CODES})"


def upgrade() -> None:
    """Allow them."""
    _replace(_AFTER)


def downgrade() -> None:
    """Forbid them; the choices of such layers are lost."""
    op.execute("DELETE FROM allocations WHERE kind = 'low_rank' AND bits IS NOT NULL")
    _replace(_BEFORE)


def _replace(constraint: str) -> None:
    with op.batch_alter_table("allocations") as allocations:
        allocations.drop_constraint(op.f("ck_allocations_kind"), type_="check")
        allocations.create_check_constraint(op.f("ck_allocations_kind"), constraint)
