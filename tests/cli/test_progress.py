"""The progress of a download, in a terminal and elsewhere."""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from rich.text import Text

from syringa.cli.download_progress import DownloadLines, open_progress
from syringa.modelfiles import locate
from tests.cli.conftest import Result
from tests.modelfiles.fake_hub import FakeHub, fake_hub
from tests.modelfiles.gguf_builder import TENSORS, gguf, llama

MODEL = "org/llama-GGUF"
CONTENT = gguf(llama(), TENSORS)


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories[MODEL] = {"llama-Q4_K_M.gguf": CONTENT}
        yield server


def test_progress_bar_reaches_the_size_of_the_model_and_goes(
    syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setenv("TERM", "xterm")
    result = syringa("pull", MODEL)
    assert (result.status, result.out) == (0, "")
    last = Text.from_ansi(result.err).plain.rpartition("Downloading")[2]
    assert f"{MODEL} " in last
    assert f"{len(CONTENT) / 1000:.1f}/{len(CONTENT) / 1000:.1f} kB" in last
    assert result.err.endswith(f"{MODEL} is at {locate(MODEL).path}\n")
    assert "\x1b[2K" in result.err.rpartition("kB")[2]  # its line is cleared


SIZE = f"{len(CONTENT) / 1000:.1f} kB"


def test_size_is_printed_at_the_start_elsewhere(syringa: Callable[..., Result]) -> None:
    assert syringa("pull", MODEL) == (
        0,
        "",
        f"Downloading {MODEL}: {SIZE}\n{MODEL} is at {locate(MODEL).path}\n",
    )
    assert syringa("pull", MODEL).err == f"{MODEL} is at {locate(MODEL).path}\n"  # already present


def print_lines(*updates: tuple[float, int], total: int = 1000) -> list[str]:
    """Return the lines of a download to a file that has so many bytes at these times."""
    output, now = io.StringIO(), [0.0]
    lines = DownloadLines(Console(file=output), "[m]", lambda: now[0])
    for now[0], done in updates:
        lines.update(done, total)
    return output.getvalue().splitlines()


def test_line_is_printed_for_every_ten_percent() -> None:
    updates = [(0.0, done) for done in range(0, 1001, 5)]
    assert print_lines(*updates) == [
        "Downloading [m]: 1.0 kB",
        *(f"[m]: {percent} % ({percent * 10} bytes of 1.0 kB)" for percent in range(10, 100, 10)),
    ]


def test_line_is_printed_every_half_minute() -> None:
    assert print_lines((0, 500), (29, 501), (31, 520), (60, 530), (61.5, 590), (62, 1000)) == [
        "Downloading [m]: 1.0 kB, of which 500 bytes are here",
        "[m]: 52 % (520 bytes of 1.0 kB)",
        "[m]: 59 % (590 bytes of 1.0 kB)",
    ]


@pytest.mark.parametrize("command", [("pull", MODEL), ("run", MODEL, "hi")])
def test_wait_for_the_hub_is_reported(
    command: tuple[str, ...], hub: FakeHub, syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("syringa.modelfiles.preview.time", types.SimpleNamespace(sleep=waits.append))
    hub.statuses, hub.retry_after = [429], "41"
    result = syringa(*command)
    assert waits == [41]
    assert f"{MODEL}: waiting 41 s (429)\n" in result.err


def test_wait_for_a_file_is_reported(hub: FakeHub, syringa: Callable[..., Result]) -> None:
    hub.cut_after["llama-Q4_K_M.gguf"] = [len(CONTENT), len(CONTENT) // 2]  # of the preview, and of the download
    with mock.patch("syringa.modelfiles.hub.download.__defaults__", (lambda seconds: None,)):
        result = syringa("pull", MODEL)
    assert result.err.splitlines()[0] == f"Downloading {MODEL}: {SIZE}"
    assert f"{MODEL}: waiting 1 s (the connection failed)\n" in result.err


def test_wait_is_shown_in_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=200)
    with open_progress(console, MODEL) as progress:
        progress.update(0, 1000)
        progress.wait(60, "429")
    assert f"Downloading {MODEL}: waiting 60 s (429) " in Text.from_ansi(output.getvalue()).plain


def test_interrupted_download_leaves_no_traceback(
    syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DownloadLines, "update", interrupt)
    assert syringa("pull", MODEL) == (130, "", "")
