"""The export `factored` is called `rocket`."""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rename the files of its folder; requests and reports are read with either name."""
    _rename("factored", "rocket")


def downgrade() -> None:
    """Rename them back."""
    _rename("rocket", "factored")


def _rename(old: str, new: str) -> None:
    op.execute(f"UPDATE artifacts SET name = '{new}' || substr(name, {len(old) + 1}) WHERE name LIKE '{old}/%'")  # noqa: S608 - two words
