"""Alembic's entry point: applies the revisions over the connection that `app.shared.database` has opened."""

from alembic import context

from app.shared import models

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=models.Base.metadata,
    compare_type=True,
    # SQLite alters most things only by rebuilding the table.
    render_as_batch=connection.dialect.name == "sqlite",
    user_module_prefix="models.",
)
context.run_migrations()
