"""Trusted reverse proxies, and the addresses of their clients."""

import functools
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_network

from app.services.access import parse_ip
from app.shared.settings.networks import Network

# A client with one IPv6 address usually controls the whole /64 network.
_NETWORK_BITS = 64


class TrustedProxies:
    """The set of trusted proxies.

    Args:
        networks: the networks of the proxies.
    """

    def __init__(self, networks: Iterable[Network]) -> None:
        self._networks = tuple(networks)

    def __contains__(self, address: str) -> bool:
        ip = parse_ip(address) if self._networks else None
        return ip is not None and any(ip in network for network in self._networks)

    def find_client(self, peer: str, hops: Iterable[str]) -> str:
        """Return the client's address: the rightmost one that is not a trusted proxy.

        Each proxy appends the address that it was called from, so everything to the left of the first untrusted address
        may be forged. An entry that is not an IP address ends the search at the proxy that sent it.

        Args:
            peer: the address of the connection, a trusted proxy.
            hops: the entries of `X-Forwarded-For`, left to right.
        """
        client = peer
        for hop in reversed(list(hops)):
            ip = parse_ip(_without_port(hop))
            if ip is None:
                break
            client = str(ip)
            if client not in self:
                break
        return client


@functools.lru_cache(maxsize=4096)
def client_group(address: str) -> str:
    """Return the unit in which an address is counted: itself, or its IPv6 /64 network; not every peer has an IP."""
    ip = parse_ip(address)
    if ip is None:
        return address
    return str(ip_network((ip, _NETWORK_BITS), strict=False) if isinstance(ip, IPv6Address) else ip)


def _without_port(hop: str) -> str:
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
