import socket
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis.strategies import data, ip_addresses

from app.shared.errors import InvalidRequestError
from app.shared.webhook_addresses import ForbiddenAddressError, is_public, parse_destination

# A prefix, and the position of the last bit of the IPv4 address.
EMBEDDINGS = {
    "compatible": ("::", 0),
    "mapped": ("::ffff:0:0", 0),
    "translated": ("::ffff:0:0:0", 0),
    "NAT64": ("64:ff9b::", 0),
    "NAT64 of a network": ("64:ff9b:1::", 0),
    "6to4": ("2002::", 80),
    "Teredo server": ("2001::", 64),
    "site-local": ("fec0::", 0),
}
# Blocks at IANA, of which some are newer than the oldest version of Python.
SPECIAL = (
    *("192.88.99.0/24", "100.64.0.0/10", "240.0.0.0/4", "::/16", "64:ff9b:1::/48", "100::/64", "2001::/23"),
    *("2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "2001:4860:4860::8888", "1.1.1.1", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.1"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "192.88.99.1", "192.0.0.192"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
        # Addresses of IPv4 within those of IPv6.
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe"),
        *("2002:7f00:1::", "2002:a00:1::1", "2001:0:808:808:0:0:80ff:fffe"),
        *(
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:0:127.0.0.1",
            "::ffff:0:8.8.8.8",
            "64:ff9b:1::7f00:1",
            "64:ff9b:1:fffe::1",
        ),
        *("fec0::1", "5f00::1", "3fff::1", "3fff:fff:ffff::1", "100::1", "100:0:0:1::1", "4000::1", "2001:2::1"),
    ],
)
def test_private_addresses_are_not_public(address):
    assert not is_public(address)


@given(ip_addresses(v=4))
def test_an_ipv4_address_is_public_only_if_python_says_so(address):
    # The registries have grown since the oldest version of Python, and shrunk only by protocol assignments.
    assert not is_public(str(address)) or (address.is_global and not address.is_multicast)


@given(ip_addresses(v=6))
def test_an_ipv6_address_is_public_only_if_python_says_so(address):
    assert not is_public(str(address)) or (address.is_global and not address.is_multicast)


@pytest.mark.parametrize("network", EMBEDDINGS)
@given(address=ip_addresses(v=4))
def test_an_embedded_ipv4_address_is_never_more_public(network, address):
    prefix, shift = EMBEDDINGS[network]
    embedded = IPv6Address(int(IPv6Address(prefix)) | int(address) << shift)
    assert not is_public(str(embedded)) or (network == "NAT64" and is_public(str(address)))


@given(ip_addresses(v=4))
def test_nat64_reaches_what_ipv4_reaches(address):
    assert is_public(f"64:ff9b::{address}") == is_public(str(address))


@pytest.mark.parametrize("block", SPECIAL)
@given(data=data())
def test_no_address_of_a_special_block_is_public(block, data):
    assert not is_public(str(data.draw(ip_addresses(network=block))))


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.org/", "https://127.0.0.1/", "https://[::1]/", "https://localhost/", "https://localhost./"),
        *("https://user@example.org/", "https://u:p@example.org/", "https://example.org/#x", "ftp://example.org/"),
        *("https:///path", "https://", "example.org", "https://example.org:0/", "https://example.org:99999/"),
        *("https://exa mple.org/", "https://example.org/\r\nHost: x", "https://ex\u0430mple.org/", "https://[::1/"),
        "https://example.org/" + "a" * 2000,
    ],
)
def test_other_urls_are_refused(url):
    with pytest.raises(InvalidRequestError) as refused:
        parse_destination(url, allow_private=False)
    assert refused.value.param == "url"


def test_a_destination_has_the_parts_of_its_url():
    found = parse_destination("https://Example.org:8443/hook?a=b", allow_private=False)
    assert (found.host, found.port, found.target, found.authority) == (
        "example.org",
        8443,
        "/hook?a=b",
        "example.org:8443",
    )
    assert parse_destination("https://example.org", allow_private=False).authority == "example.org"
    assert parse_destination("http://[::1]:80/", allow_private=True).authority == "[::1]"


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:10.0.0.1"]])
def test_a_name_with_any_private_address_is_refused(monkeypatch, addresses):
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: entries)
    destination = parse_destination("https://rebind.example/", allow_private=False)
    with pytest.raises(ForbiddenAddressError, match="not on the public internet"):
        destination.resolve(allow_private=False)
    assert destination.resolve(allow_private=True) == addresses[0]


def test_a_name_that_does_not_resolve_is_refused(monkeypatch):
    def fail(*_arguments, **_options):
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ForbiddenAddressError, match="does not resolve"):
        parse_destination("https://none.example/", allow_private=False).resolve(allow_private=False)
