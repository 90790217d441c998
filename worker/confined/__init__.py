"""Processes that read models or use the network: confined, without the service's secrets."""
