"""A server that cannot start prints one line and exits with a nonzero status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from syringa.modelfiles import locate

pytestmark = pytest.mark.model


def fails(*arguments: str) -> str:
    """Start a server that must fail, and return the only line of its output that is not a log line of level INFO."""
    command = [sys.executable, "-m", "syringa", "serve", "--port", "0", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode not in (0, None)
    assert "Traceback" not in result.stderr + result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip() and " INFO " not in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return path


def test_missing_model_file_is_reported() -> None:
    assert "nowhere.gguf" in fails("--model", "nowhere.gguf")


def test_truncated_gguf_is_reported(tmp_path: Path) -> None:
    whole = Path(locate("default").path).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    assert f"{cut} is cut off or corrupt" in fails("--model", str(cut))


@pytest.mark.slow
def test_unknown_architecture_is_reported(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", model_type="martian", architectures=["MartianForCausalLM"], vocab_size=8)
    (path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
    )
    assert "martian" in fails("--model", str(path)).lower()


def test_folder_without_tokenizer_is_reported(tmp_path: Path) -> None:
    assert "tokenizer" in fails("--model", str(folder(tmp_path / "m", model_type="llama")))


@pytest.mark.slow
def test_missing_chat_template_is_reported() -> None:
    assert "nowhere.jinja" in fails("--chat-template", "nowhere.jinja")


def test_too_little_memory_is_reported() -> None:
    assert "memory" in fails("--kv-cache-gb", "100000")


def test_listening_beyond_loopback_without_a_key_is_refused() -> None:
    line = fails("--host", "0.0.0.0")
    assert "--api-key" in line or "SYRINGA_API_KEY" in line


@pytest.mark.slow
def test_impossible_context_length_is_reported() -> None:
    assert "8192" in fails("--max-model-len", "1000000")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("workers = 0", ": workers 0: expected a whole number, at least 1"),
        ('port = "eighty"', ': port "eighty": expected a whole number'),
        ("requests_per_minute = -1", ": requests_per_minute -1: expected a whole number, at least 0"),
        ('log_format = "xml"', "expected one of text, json"),
        ("prot = 80", "did you mean 'port'?"),
        ("port = ", ", line 3: invalid TOML: "),
    ],
)
def test_wrong_value_in_the_settings_file_is_reported(tmp_path: Path, wrong: str, expected: str) -> None:
    path = tmp_path / "syringa.toml"
    path.write_text(f'# settings\nhost = "127.0.0.1"\n{wrong}\n')
    line = fails("--config", str(path))
    assert str(path) in line
    assert expected in line
