"""Turns of tenants and webhooks in deliveries, and the key that a key was made with."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add them; it is not known what earlier keys were made with."""
    op.add_column("tenants", sa.Column("next_delivery_at", _INSTANT))
    op.add_column("webhooks", sa.Column("next_attempt_at", _INSTANT))
    op.add_column("webhooks", sa.Column("slow_failures", sa.Integer(), nullable=False, server_default="0"))
    for column in ("webhook_id", "available_at"):
        op.drop_index(op.f(f"ix_webhook_deliveries_{column}"), "webhook_deliveries")
    op.create_index(
        op.f("ix_webhook_deliveries_webhook_id_available_at"), "webhook_deliveries", ["webhook_id", "available_at"]
    )
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(sa.Column("made_with", sa.String(16)))
        keys.create_foreign_key(op.f("fk_api_keys_made_with"), "api_keys", ["made_with"], ["id"], ondelete="CASCADE")
        keys.create_index(op.f("ix_api_keys_made_with"), ["made_with"])


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_index(op.f("ix_api_keys_made_with"))
        keys.drop_constraint(op.f("fk_api_keys_made_with"), type_="foreignkey")
        keys.drop_column("made_with")
    op.drop_index(op.f("ix_webhook_deliveries_webhook_id_available_at"), "webhook_deliveries")
    for column in ("webhook_id", "available_at"):
        op.create_index(op.f(f"ix_webhook_deliveries_{column}"), "webhook_deliveries", [column])
    op.drop_column("webhooks", "slow_failures")
    op.drop_column("webhooks", "next_attempt_at")
    op.drop_column("tenants", "next_delivery_at")
