from __future__ import annotations

import socket

import pytest

from syringa.config import Config
from syringa.errors import StartupError
from syringa.http.server.listener import check, listen


def test_listen_reports_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            listen(Config(port=port))
    assert "\n" not in caught.value.message


def test_listen_reports_an_unknown_host() -> None:
    with pytest.raises(StartupError, match="cannot listen"):
        listen(Config(host="no-such-host.invalid", api_key=("k",)))


def test_listen_binds_a_free_port() -> None:
    with listen(Config(port=0)) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize("database", ["mysql://a:secret@b/c", "sqlite://", "/"])
def test_check_reports_an_invalid_database(database: str) -> None:
    with pytest.raises(StartupError, match="database") as caught:
        check(Config(database=database))
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message
