from __future__ import annotations

import pytest

from syringa.config import Config
from syringa.errors import ConfigError
from syringa.service.app_state import AppState
from syringa.service.mcp.hosts import AllowedHosts


@pytest.mark.parametrize(
    ("entry", "scheme", "host", "port", "allowed"),
    [
        ("example.com", "https", "example.com", None, True),
        ("Example.COM.", "https", "example.com", 8443, True),
        ("example.com", "https", "EXAMPLE.com.", None, True),
        ("example.com", "https", "mcp.example.com", None, False),
        ("example.com", "https", "example.com.evil.test", None, False),
        ("example.com:443", "https", "example.com", None, True),
        ("example.com:80", "https", "example.com", None, False),
        ("example.com:80", "http", "example.com", None, True),
        ("example.com:8443", "https", "example.com", 8443, True),
        ("127.0.0.1:9", "http", "127.0.0.1", 9, True),
        ("127.0.0.1:9", "http", "127.0.0.1", 10, False),
        ("[::1]:9", "http", "::1", 9, True),
        ("[::1]", "http", "::1", 9, True),
    ],
)
def test_listed_host_is_allowed_and_may_be_private(
    entry: str, scheme: str, host: str, port: int | None, allowed: bool
) -> None:
    hosts = AllowedHosts([entry])
    assert hosts
    assert hosts.allows(scheme, host, port) is allowed
    assert hosts.allows_private(scheme, host, port) is allowed


def test_asterisk_allows_any_host_without_private_addresses() -> None:
    hosts = AllowedHosts(["*", "inside.test"])
    assert hosts.allows("https", "anything.test", None)
    assert not hosts.allows_private("https", "anything.test", None)
    assert hosts.allows_private("https", "inside.test", None)
    assert not AllowedHosts([])


@pytest.mark.parametrize("entry", ["https://example.com", "example.com/mcp", "user@example.com", "", "a b", "a:b", "["])
def test_invalid_entry_stops_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="mcp_hosts"):
        AppState(Config(mcp_hosts=(entry,)))
