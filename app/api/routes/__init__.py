"""Endpoints, one router per resource."""
