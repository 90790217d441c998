"""The history of the database schema; `app.shared.database.upgrade` applies it."""
