"""The progress of a download, in a terminal and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.text import Text

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


def test_progress_is_not_shown_elsewhere(syringa: Callable[..., Result]) -> None:
    assert syringa("pull", MODEL).err == f"{MODEL} is at {locate(MODEL).path}\n"


def test_interrupted_download_leaves_no_traceback(
    syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.update", interrupt)
    assert syringa("pull", MODEL) == (130, "", "")
