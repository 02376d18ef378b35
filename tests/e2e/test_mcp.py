"""MCP servers in the Responses API of `syringa serve`, on the real model, with the official client."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import KEY, MODEL
from tests.e2e.scripts import run_python
from tests.e2e.sdk import OPENAI_PYTHON
from tests.e2e.server import serve
from tests.mcp_server import dice_server

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_openai_client_uses_an_mcp_server(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("--served-model-name", MODEL, "--max-model-len", "2048", "--api-key", KEY)
    with dice_server() as dice, serve(*settings, "--mcp-hosts", dice.host) as server:
        monkeypatch.setenv("MCP_URL", dice.url)
        run_python(server, "openai_mcp_client.py", OPENAI_PYTHON)
        assert [name for name, _ in dice.calls] == ["roll"] * 3
        log = server.log.read_text()
    assert dice.token not in log
    assert "Traceback" not in log
