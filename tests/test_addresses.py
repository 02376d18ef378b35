from __future__ import annotations

import pytest

from syringa.addresses import is_allowed_address


@pytest.mark.parametrize(
    "address",
    [
        *(
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "198.18.0.1",
            "198.51.100.7",
        ),
        *("203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1"),
        *("2001::1", "2001:0:4136:e378::1", "2001:db8::1", "2002:7f00:1::1", "3fff::1", "5f00::1"),
        *("fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "ff02::1", "4000::1"),
    ],
)
def test_special_addresses_are_never_allowed(address: str) -> None:
    assert not is_allowed_address(address, allow_private=False)
    assert not is_allowed_address(address, allow_private=True)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "172.16.5.4",
        "172.31.255.255",
        "192.168.1.1",
        "::1",
        "fd00::1",
    ],
)
def test_private_addresses_require_permission(address: str) -> None:
    assert not is_allowed_address(address, allow_private=False)
    assert is_allowed_address(address, allow_private=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "100.63.0.1", "172.32.0.1", "192.0.1.1", "2606:4700:4700::1111"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed_address(address, allow_private=False)
