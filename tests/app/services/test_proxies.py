import pytest

from app.services.proxies import client_group


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::/64"),
        ("2001:db8:0:1::7", "2001:db8:0:1::/64"),
        # The server reports no address for a Unix socket, and some servers report its path or a host name.
        ("", ""),
        ("/run/proxy.sock", "/run/proxy.sock"),
        ("testclient", "testclient"),
    ],
)
def test_an_address_is_counted_by_itself_or_by_its_network(address, group):
    assert client_group(address) == group
