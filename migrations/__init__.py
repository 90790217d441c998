"""Migrations of the database schema; `app.shared.database.upgrade` applies them."""
