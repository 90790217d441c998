"""Endpoints, one router per noun."""
