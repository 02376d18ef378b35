"""What a terminal shows while a model is loaded for a command."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from syringa.cli.startup import describe_progress, loading_status
from syringa.config import Config
from syringa.engine.client.local import start_local
from syringa.engine.processes import worker_process
from syringa.types import LoadProgress
from tests.e2e import load_gate
from tests.e2e.load_gate import LoadGate
from tests.engine.loading.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (LoadProgress("starting"), "starting its worker …"),
        (LoadProgress("weights"), "reading weights …"),
        (LoadProgress("weights", 0.0), "reading weights, 0%"),
        (LoadProgress("weights", 0.42), "reading weights, 42%"),
        (LoadProgress("warmup", 1.0), "warming up, 100%"),
    ],
)
def test_progress_in_words(progress: LoadProgress, text: str) -> None:
    assert describe_progress(progress) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_loading_status_is_shown_on_a_terminal_only(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    with loading_status(console) as (status, show):
        show(LoadProgress("weights", 0.42))
        status.stop()
    shown = Text.from_ansi(written.getvalue()).plain
    assert ("Loading the model: reading weights, 42%" in shown) is terminal
    assert bool(shown) is terminal


async def test_local_worker_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "WORKER_MODULE", load_gate.MODULE)
    monkeypatch.setenv(load_gate.VARIABLE, str(tmp_path / "gate"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # this test runs in another folder
    gate, seen = LoadGate(tmp_path / "gate"), [LoadProgress("starting")]
    gate.close(1)  # of two parts

    def show(progress: LoadProgress) -> None:
        if progress != seen[-1]:
            seen.append(progress)
        if progress == LoadProgress("weights", 0.5) and (tmp_path / "gate").exists():
            gate.open()

    config = Config(model=str(write_gguf(tmp_path / "m.gguf")), device="cpu", threads=1)
    async with start_local(config, on_progress=show) as client:
        assert client.info is not None
    assert LoadProgress("weights", 0.5) in seen
    fractions = [each.fraction or 0.0 for each in seen if each.phase == "weights"]
    assert fractions == sorted(fractions)
