"""Attacks on a running service."""
