"""Sessions that can be revoked, and an append-only audit log."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_INSTANT = sa.DateTime(timezone=True)
_REFUSE = "BEGIN SELECT RAISE(ABORT, 'audit_events is append-only'); END"
_SQLITE_TRIGGERS = (
    f"CREATE TRIGGER audit_events_no_update BEFORE UPDATE ON audit_events {_REFUSE}",
    f"CREATE TRIGGER audit_events_no_delete BEFORE DELETE ON audit_events {_REFUSE}",
    # INSERT OR REPLACE deletes a row without firing the delete trigger.
    "CREATE TRIGGER audit_events_no_replace BEFORE INSERT ON audit_events "
    "WHEN EXISTS (SELECT 1 FROM audit_events WHERE id = NEW.id) "
    "BEGIN SELECT RAISE(ABORT, 'audit_events is append-only'); END",
)
_POSTGRES_TRIGGERS = (
    "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'audit_events is append-only'; END $$",
    "CREATE TRIGGER audit_events_append_only BEFORE UPDATE OR DELETE ON audit_events "
    "FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()",
    "CREATE TRIGGER audit_events_no_truncate BEFORE TRUNCATE ON audit_events "
    "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()",
)


def upgrade() -> None:
    """Add them; users who are signed in have to sign in again."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT, nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_sessions_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index("ix_sessions_key_id", "sessions", ["key_id"])
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_table(
        "audit_events",
        sa.Column("id", _SERIAL, nullable=False),
        sa.Column("at", _INSTANT, nullable=False),
        sa.Column("tenant", sa.String(64)),
        sa.Column("actor", sa.String(16), nullable=False),
        sa.Column("address", sa.String(64)),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64)),
        sa.Column("request_id", sa.String(64)),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("detail", _JSON, nullable=False),
        sa.CheckConstraint("outcome IN ('success', 'failure')", name=op.f("ck_audit_events_outcome")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_index("ix_audit_events_tenant_id", "audit_events", ["tenant", "id"])
    op.create_index("ix_audit_events_at", "audit_events", ["at"])
    is_postgres = op.get_bind().dialect.name == "postgresql"
    for statement in _POSTGRES_TRIGGERS if is_postgres else _SQLITE_TRIGGERS:
        op.execute(statement)


def downgrade() -> None:
    """Remove them; the audit log is lost."""
    # Its triggers are dropped with the table.
    op.drop_table("audit_events")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_change()")
    op.drop_table("sessions")
