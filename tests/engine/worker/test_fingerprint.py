from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from syringa.engine.worker.fingerprint import worker_fingerprint
from syringa.modelfiles import ModelFiles
from tests.engine.processes.stub_worker import INFO


def fingerprint(path: Path, device: str = "cpu", **info: str) -> str:
    files = ModelFiles("m", str(path), "gguf" if path.is_file() else "folder")
    return worker_fingerprint(files, msgspec.structs.replace(INFO, **info), device=device, torch_version="2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


def test_fingerprint_is_the_same_for_a_copy_of_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / model.name
    copy.write_bytes(model.read_bytes())
    assert fingerprint(model) == fingerprint(model) == fingerprint(copy)


def test_fingerprint_depends_on_what_changes_outputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        fingerprint(model),
        fingerprint(model, dtype="bf16"),
        fingerprint(model, kernels="avx2"),
        fingerprint(model, device="NVIDIA H200"),
    ]
    monkeypatch.setattr("syringa.engine.worker.fingerprint.cpu_flags", lambda: {"avx2", "fpu"})
    found.append(fingerprint(model))
    monkeypatch.setattr("syringa.engine.worker.fingerprint.cpu_flags", lambda: {"avx512f", "fpu"})
    found.append(fingerprint(model))
    model.write_bytes(b"GGUF" + bytes(999) + b"1")
    found.append(fingerprint(model))
    model.write_bytes(b"GGUF" + bytes(2000))
    found.append(fingerprint(model))
    assert len(set(found)) == len(found)


def test_fingerprint_does_not_depend_on_threads_and_load_time(model: Path) -> None:
    files = ModelFiles("m", str(model), "gguf")
    other = msgspec.structs.replace(INFO, threads=9, load_seconds=5.0)
    assert worker_fingerprint(files, other, device="cpu", torch_version="2") == fingerprint(model)


def test_fingerprint_of_a_folder_covers_its_weights_and_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"header")
    found = [fingerprint(tmp_path)]
    (tmp_path / "README.md").write_text("text")
    assert fingerprint(tmp_path) == found[0]
    (tmp_path / "config.json").write_text('{"a": 1}')
    found.append(fingerprint(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"HEADER")
    found.append(fingerprint(tmp_path))
    assert len(set(found)) == 3
