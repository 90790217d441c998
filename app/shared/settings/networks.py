"""IP networks in settings."""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse a list of IP addresses and networks, separated by commas.

    Raises:
        ValueError: an entry is neither, has host bits set, or covers every address.
    """
    try:
        networks = tuple(_parse_network(part.strip()) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError("is not a list of IP addresses and networks; write 10.0.0.2 or 10.0.0.0/24,fd00::1") from None
    if any(network.prefixlen == 0 for network in networks):
        raise ValueError("trusts every address; name the addresses of your proxies")
    return networks


def _parse_network(text: str) -> Network:
    if "%" in text:
        raise ValueError("an address with a zone never matches a peer; write it without %zone")
    return ipaddress.ip_network(text)
