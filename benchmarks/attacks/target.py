"""A service under attack."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from tests.e2e.service_process import Service

REQUEST = {"ratio": 0.3, "calibration": {"samples": 2, "sequence_length": 16}}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A service under attack.

    Attributes:
        url: its address.
        models: its models folder.
        keys: an API key for each of two tenants, the attacker's first.
        service: the processes.
    """

    url: str
    models: Path
    keys: tuple[str, str]
    service: Service

    def client(self, tenant: int = 0, **options: object) -> httpx2.Client:
        """Return a client with the key of a tenant."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def connect(self) -> socket.socket:
        """Return a connection on which nothing is sent yet."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=30)

    def head(self, method: str, path: str, *lines: str, tenant: int = 0) -> bytes:
        """Return a request head."""
        host = urlsplit(self.url).netloc
        first = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {self.keys[tenant]}"]
        return "\r\n".join([*first, *lines, "", ""]).encode()
