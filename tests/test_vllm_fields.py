"""The script that compares vLLM's request fields with the support matrix."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from scripts import vllm_fields

CHAT = '''
from pydantic import BaseModel

class Base(BaseModel):
    model_config = {"extra": "allow"}
    seed: int | None = None
    from_the_base: int = 0

class ChatCompletionRequest(Base):
    """Docstring."""

    known: ClassVar[int] = 1
    messages: list[dict]
    temperature: float | None = None
    brand_new: bool = Field(default=False, description="Not known here.")
    _private: bool = PrivateAttr(default=False)

    @property
    def not_a_field(self) -> int: ...

    def build(self) -> None:
        local: int = 1
'''
OTHERS = """
class CompletionRequest(Base):
    prompt: str
class ResponsesRequest(Base):
    input: str
class TokenizeCompletionRequest(Unknown):
    prompt: str
class TokenizeChatRequest(module.Unknown):
    messages: list
class DetokenizeRequest(Unknown):
    tokens: list[int]
"""


def source_tree(folder: Path, others: str = OTHERS) -> Path:
    chat = folder / "vllm" / "entrypoints" / "openai" / "chat"
    chat.mkdir(parents=True)
    (chat / "protocol.py").write_text(CHAT)
    (chat.parent.parent / "protocol.py").write_text(others)
    (chat / "serving.py").write_text("this is not parsed")
    return folder


def test_fields_without_a_row_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_fields.main([str(source_tree(tmp_path))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ChatCompletionRequest.from_the_base: no row",
        "ChatCompletionRequest.brand_new: no row",
        "CompletionRequest.from_the_base: no row",
        "ResponsesRequest.from_the_base: no row",
    ]


def test_nothing_is_reported_if_every_field_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = source_tree(tmp_path)
    for file in tree.rglob("protocol.py"):
        lines = [line for line in file.read_text().splitlines() if "brand_new" not in line and "base:" not in line]
        file.write_text("\n".join(lines))
    assert vllm_fields.main([str(tree)]) == 0
    assert capsys.readouterr().out == ""


def test_missing_class_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = source_tree(tmp_path, OTHERS.replace("DetokenizeRequest", "Renamed"))
    assert vllm_fields.main([str(tree)]) == 2
    assert "no class DetokenizeRequest" in capsys.readouterr().err


def test_missing_vllm_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert vllm_fields.main([]) == 2
    assert "not installed" in capsys.readouterr().err


def test_installed_vllm_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = source_tree(tmp_path) / "vllm"
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert vllm_fields.installed_folder() == package
    assert vllm_fields.main([]) == 1
