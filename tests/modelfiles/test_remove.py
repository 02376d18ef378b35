from __future__ import annotations

import os
from pathlib import Path

import pytest

from syringa import modelfiles
from syringa.errors import ModelError
from syringa.modelfiles.remove import is_pulled, remove
from tests.api.model_files import write_model_folder
from tests.modelfiles.gguf_builder import gguf, llama

CONTENT = gguf(llama(), {"token_embd.weight": (8, 6)})


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def in_cache(tmp_path: Path, *files: str, blob: str = "b1") -> Path:
    """Write a repository as the Hugging Face cache has it: links in a snapshot to files that are named by content."""
    repository = tmp_path / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "blobs" / blob).write_bytes(CONTENT)
    for name in files:
        os.symlink(f"../../blobs/{blob}", snapshot / name)
    return repository


def test_pulled_file_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "models"
    folder.mkdir(parents=True)
    for name in ("tiny.gguf", "other.gguf"):
        (folder / name).write_bytes(CONTENT)
    files = modelfiles.locate("tiny")
    assert is_pulled(files)
    remove(files)
    assert [each.name for each in folder.iterdir()] == ["other.gguf"]
    with pytest.raises(ModelError):
        modelfiles.locate("tiny")


def test_file_in_the_cache_is_deleted_with_what_it_links_to(tmp_path: Path) -> None:
    repository = in_cache(tmp_path, "m-Q4_0.gguf")
    in_cache(tmp_path, "m-Q8_0.gguf", blob="b2")
    remove(modelfiles.locate("org/model:Q4_0"))
    assert [each.name for each in (repository / "blobs").iterdir()] == ["b2"]
    assert modelfiles.locate("org/model:Q8_0").kind == "gguf"


def test_content_that_another_snapshot_uses_stays(tmp_path: Path) -> None:
    repository = in_cache(tmp_path, "m-Q4_0.gguf", "same-Q4_1.gguf")
    remove(modelfiles.locate("org/model:Q4_0"))
    assert (repository / "blobs" / "b1").exists()
    assert modelfiles.locate("org/model:Q4_1").kind == "gguf"


def test_repository_of_a_folder_is_deleted(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_model_folder(snapshot)
    remove(modelfiles.locate("org/model"))
    assert list((tmp_path / "hub").iterdir()) == []


def test_files_from_elsewhere_are_not_deleted(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    files = modelfiles.locate(str(file))
    assert not is_pulled(files)
    with pytest.raises(ModelError, match="were not pulled"):
        remove(files)
    assert file.exists()
