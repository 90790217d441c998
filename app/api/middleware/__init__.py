"""Middleware: what every request passes through before its endpoint."""
