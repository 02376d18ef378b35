"""Downloads that requests share, with a download that the test controls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from syringa.api.ollama.manage import OllamaProgress
from syringa.api.ollama.pull import ModelPulls, name_to_pull
from syringa.errors import FailedDependency, InvalidRequest, ModelError, NotFound
from syringa.modelfiles.download import RemoteFile

FILE = RemoteFile("model.gguf", 100, "ab" * 32)
SECONDS = 30.0  # ends a test that would hang


@dataclass
class FakePull:
    """Reports half of a file, and then waits for the test."""

    go_on: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    started: int = 0
    error: Exception | None = None
    seen: list[int] = field(default_factory=list)

    def __call__(self, model: str, *, on_file: Callable[[RemoteFile, int], None]) -> None:
        self.started += 1
        self.ended.clear()
        try:
            on_file(FILE, 50)
            assert self.go_on.wait(SECONDS)
            if self.error is not None:
                raise self.error
            on_file(FILE, 100)
            self.seen.append(100)
        finally:
            self.ended.set()


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  a thread makes it true
            await asyncio.sleep(0.005)


async def test_requests_for_one_model_share_a_download() -> None:
    pull = FakePull()
    pulls = ModelPulls(pull)
    first: list[OllamaProgress] = []
    second: list[OllamaProgress] = []
    one = asyncio.create_task(pulls.run("m", first.append))
    await wait_for(lambda: first)
    two = asyncio.create_task(pulls.run("m", second.append))
    await asyncio.sleep(0)
    pull.go_on.set()
    await asyncio.gather(one, two)
    assert pull.started == 1
    assert [line.completed for line in first] == [50, 100]
    assert [line.completed for line in second] == [100]
    assert first[0] == OllamaProgress(
        status="pulling abababababab", digest=f"sha256:{'ab' * 32}", total=100, completed=50
    )


async def test_download_goes_on_while_any_request_waits_and_is_canceled_afterwards() -> None:
    pull = FakePull()
    pulls = ModelPulls(pull)
    lines: list[OllamaProgress] = []
    one = asyncio.create_task(pulls.run("m", lines.append))
    two = asyncio.create_task(pulls.run("m", lines.append))
    await wait_for(lambda: lines)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert not pull.ended.is_set()
    two.cancel()
    await asyncio.gather(two, return_exceptions=True)
    again = asyncio.create_task(pulls.run("m", lines.append))  # it waits for the one before
    await asyncio.sleep(0)
    pull.go_on.set()
    await again
    assert (pull.started, pull.seen) == (2, [100])  # the first ended where it next reported


async def test_failed_download_is_an_error_of_every_request_and_not_of_the_next() -> None:
    pull = FakePull(error=ModelError("the Hub refuses it"))
    pull.go_on.set()
    pulls = ModelPulls(pull)
    results = await asyncio.gather(*(pulls.run("m", lambda line: None) for _ in range(2)), return_exceptions=True)
    assert [type(each) for each in results] == [FailedDependency, FailedDependency]
    assert str(results[0]) == "The Hub refuses it."
    pull.error = PermissionError(13, "Permission denied", "/models/m")
    with pytest.raises(FailedDependency, match=r"written: Permission denied\.$"):  # without the path
        await pulls.run("m", lambda line: None)
    pull.error = None
    await pulls.run("m", lambda line: None)
    assert pull.seen == [100]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("qwen3-0.6b:latest", "qwen3-0.6b"),
        ("qwen3:0.6b", "qwen3-0.6b"),
        ("smollm2", "smollm2"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("huggingface.co/Qwen/Qwen3-0.6B-GGUF", "Qwen/Qwen3-0.6B-GGUF"),
        ("https://hf.co/a/b", "a/b"),
    ],
)
def test_names_of_the_catalog_and_of_the_hub_can_be_pulled(name: str, source: str) -> None:
    assert name_to_pull(name) == source


@pytest.mark.parametrize("name", ["llama3.2", "nothing", "folder", "folder/model", "hf.co/folder/model", "hf.co/a/b/c"])
def test_other_names_are_not_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "model").mkdir(parents=True)  # which is not what is meant
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match="not found"):
        name_to_pull(name)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "~/x", "~nobody-at-all/x", "a b", "", "a" * 5000, "a\0b"])
def test_paths_are_no_names(name: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid model name"):
        name_to_pull(name)
