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
# Addresses of IPv4 within those of IPv6.
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
    """Return whether an IP address, and every IPv4 address within it, is on the public internet."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return all(each.is_global and not each.is_multicast for each in (address, *_inner(address)))


def _inner(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost"
