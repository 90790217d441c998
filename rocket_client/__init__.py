"""The `rocket` command."""
