"""What the loaders report, for every kind of file and device: it grows, and ends with all that there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.utils.logging import set_tqdm_hook

from syringa.engine.embedding.loading import load_embedding_model
from syringa.engine.loading.gpu_model import load_native_on_gpu
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.weights import open_weights
from syringa.engine.models.config import read_config
from syringa.engine.models.hf.model import HFModel, load_hf_model
from syringa.errors import ModelError
from syringa.modelfiles import describe, locate, read_embedding_spec
from tests.engine.embedding.tiny_encoders import save_encoder
from tests.engine.gpu.tiny_models import CPU
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.models.gguf_models import save_gguf
from tests.engine.models.tiny_models import SIZES, save

LAYERS = SIZES["num_hidden_layers"]


class Reports:
    def __init__(self) -> None:
        self.all: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.all.append((done, total))

    def check(self, *, steps: int) -> None:
        """Assert that they grow, and end with the total; `steps`: at least so many of them."""
        totals, done = {total for _, total in self.all}, [each for each, _ in self.all]
        assert len(totals) == 1
        assert done == sorted(done)
        assert done[-1] == totals.pop()
        assert len(set(done)) > steps


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save(made[kind], AutoConfig.for_model(kind, **SIZES))
        return made[kind]

    return get


def load(path: Path, dtype: str, reports: Reports) -> Any:
    return load_model(LoadOptions(model=str(path), dtype=dtype, threads=1, device="cpu"), reports).model


@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_native_folder(folders: Callable[[str], Path], reports: Reports, kind: str, dtype: str) -> None:
    load(folders(kind), dtype, reports)
    assert reports.all == [(done, LAYERS + 1) for done in range(LAYERS + 2)]


@pytest.mark.parametrize("dtype", ["gguf", "int8"])
def test_native_gguf_file(tmp_path: Path, reports: Reports, dtype: str) -> None:
    load(write_gguf(tmp_path / "m.gguf"), dtype, reports)
    assert reports.all == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("dtype", ["gguf", "int8"])
def test_native_gguf_file_with_experts(tmp_path: Path, reports: Reports, dtype: str) -> None:
    load(save_gguf(tmp_path, "mixtral")[0], dtype, reports)
    assert reports.all == [(done, LAYERS + 1) for done in range(LAYERS + 2)]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_folder_on_a_definition_of_transformers(folders: Callable[[str], Path], reports: Reports, dtype: str) -> None:
    assert isinstance(load(folders("olmo2"), dtype, reports), HFModel)
    reports.check(steps=20)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_gguf_file_on_a_definition_of_transformers(tmp_path: Path, reports: Reports, dtype: str) -> None:
    assert isinstance(load(save_gguf(tmp_path, "glm4")[0], dtype, reports), HFModel)
    reports.check(steps=10)


def test_folder_on_the_decoder_of_a_gpu(folders: Callable[[str], Path], reports: Reports) -> None:
    files = locate(str(folders("llama")))
    description = describe(files)
    weights = open_weights(files, description.config)
    load_native_on_gpu(read_config(description.config), description, weights, CPU, "fp32", 64, 0.0, progress=reports)
    assert reports.all == [(done, LAYERS) for done in range(LAYERS + 1)]


def test_definition_of_transformers_on_a_gpu(folders: Callable[[str], Path], reports: Reports) -> None:
    files = locate(str(folders("olmo2")))
    load_hf_model(files, describe(files), "fp32", None, 64, 1, CPU, progress=reports)
    reports.check(steps=20)


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_embedding_model(tmp_path: Path, reports: Reports, family: str) -> None:
    save_encoder(tmp_path, family, pooling="mean_tokens")
    files = locate(str(tmp_path))
    spec = read_embedding_spec(files)
    assert spec is not None
    load_embedding_model(LoadOptions(model=str(tmp_path), dtype="fp32", device="cpu"), files, spec, reports)
    reports.check(steps=1)


def test_hook_of_transformers_is_taken_back(folders: Callable[[str], Path], tmp_path: Path, reports: Reports) -> None:
    load(folders("olmo2"), "fp32", reports)
    assert set_tqdm_hook(None) is None
    save(tmp_path, AutoConfig.for_model("olmo2", **SIZES))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError):
        load(tmp_path, "fp32", reports)
    assert set_tqdm_hook(None) is None
