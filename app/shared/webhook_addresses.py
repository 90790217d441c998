"""Addresses that webhooks may be sent to: never into the operator's own network, unless that is allowed.

A name is resolved once, and the connection is made to the checked address: one that resolves to another address a
moment later (DNS rebinding) gains nothing.
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from app.shared.errors import InvalidRequestError

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 2000
# Python's own tables change with its version. These are the blocks that IANA's registries of special-purpose addresses
# do not call globally reachable, as of 2025-10-09, with multicast:
# https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry
# Exceptions within 192.0.0.0/24 and 2001::/23 are left out, as they are for protocols in which no webhook takes part.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        ),
    )
)
# Everything else in IPv6 is special or reserved: loopback, local, multicast, and other ways to write IPv4 addresses.
_GLOBAL = ipaddress.ip_network("2000::/3")
# NAT64, by which hosts without IPv4 reach all of it.
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


class ForbiddenAddressError(Exception):
    """A webhook's host is in a private network, or does not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a webhook is sent.

    Attributes:
        is_secure: whether TLS is used.
        host: name or IP address of the host.
        port: its port.
        target: path and query.
    """

    is_secure: bool
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The `Host` header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS["https" if self.is_secure else "http"] else f"{name}:{self.port}"

    def resolve(self, *, allow_private: bool) -> str:
        """Return the IP address to connect to.

        Raises:
            ForbiddenAddressError: the name does not resolve, or one of its addresses is not public.
        """
        try:
            entries = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise ForbiddenAddressError("the host's name does not resolve") from None
        addresses = [str(entry[4][0]) for entry in entries]
        if not allow_private and not all(map(is_public, addresses)):
            raise ForbiddenAddressError("the host is not on the public internet")
        return addresses[0]


def parse_destination(url: str, *, allow_private: bool) -> Destination:
    """Return the destination that a URL names, without resolving its host.

    Raises:
        InvalidRequestError: the URL is not valid, or not one that a webhook may have.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequestError("is not a URL; write https://HOST/PATH", param="url") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= _MAX_URL
    if not is_plain or parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise InvalidRequestError("is not a URL; write https://HOST/PATH", param="url")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidRequestError("a webhook's URL has neither user, password nor fragment", param="url")
    if not allow_private and (parts.scheme != "https" or _is_private_literal(parts.hostname)):
        raise InvalidRequestError(
            "webhooks are sent to https://HOST/PATH on the public internet; the operator can allow others with "
            "ROCKET_WEBHOOKS_ALLOW_PRIVATE",
            param="url",
        )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    is_secure = parts.scheme == "https"
    return Destination(is_secure=is_secure, host=parts.hostname, port=port or _PORTS[parts.scheme], target=target)


def is_public(text: str) -> bool:
    """Return whether an IP address is on the public internet; one that NAT64 translates is judged as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if address in _TRANSLATED:
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    is_assigned = address.version == 4 or address in _GLOBAL
    return is_assigned and not any(address in block for block in _SPECIAL)


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost"
