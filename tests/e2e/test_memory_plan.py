"""A server on a machine with little memory: it says what it takes, reduces the context, and keeps to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from syringa.engine.loading.memory_plan import MemorySettings, program_bytes
from syringa.engine.loading.model_size import read_size
from tests.e2e.server import serve, wait_for

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_reduced_context_is_reported_and_honored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = read_size("default")
    assert size is not None
    free = size.weights["int8"] + program_bytes(size, MemorySettings()) + 3000 * size.cache_bytes("int8")
    (tmp_path / "sitecustomize.py").write_text(
        f"import syringa.engine.cpu.features\nsyringa.engine.cpu.features.available_memory = lambda: {free}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serve("--dtype", "int8", "--device", "cpu") as server:
        printed = re.search(r"Context +([\d,]+) of 8,192 tokens", server.log.read_text())
        assert printed is not None
        context = int(printed[1].replace(",", ""))
        assert context == 2816
        wait_for(lambda: server.get("/v1/models").json()["data"][0]["max_model_len"] == context)
        assert server.complete(prompt=[5] * (context - 4), max_tokens=4).status_code == 200
        refused = server.complete(prompt=[5] * (context + 1), max_tokens=1)
        assert refused.status_code == 400
        assert f"maximum context length is {context} tokens" in refused.json()["error"]["message"]
