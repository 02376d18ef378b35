"""The comparison of the catalog with the files of its models, at a Hub of our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts import check_catalog
from syringa.modelfiles import catalog, locate
from syringa.modelfiles.catalog import CatalogModel
from syringa.modelfiles.variants import HubName

from .fake_hub import FakeHub, fake_hub
from .gguf_builder import TENSORS, gguf, llama

MODEL = gguf(llama(), TENSORS)
RIGHT = CatalogModel("right", HubName("org/model-GGUF", "Q4_K_M"), "1M", len(MODEL), 16, 64, "Llama 3.2", 6, 8)
Check = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/model-GGUF"] = {"model-Q4_K_M.gguf": MODEL}
        server.tags = ["gguf", "license:llama3.2"]
        yield server


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check a catalog of one entry. Return the status and the differences."""

    def run(model: CatalogModel = RIGHT, **changes: Any) -> tuple[int, str]:
        monkeypatch.setattr(catalog, "CATALOG", (msgspec.structs.replace(model, **changes),))
        status = check_catalog.main()
        return status, capsys.readouterr().out.strip().partition(": ")[2]

    return run


def test_right_entry_is_as_in_the_catalog(check: Check) -> None:
    assert check() == (0, "as in the catalog")
    assert check(bytes=int(1.01 * len(MODEL))) == (0, "as in the catalog")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"bytes": 2 * len(MODEL)}, f"{len(MODEL):,} bytes, and {2 * len(MODEL):,} in the catalog"),
        ({"context": 8192}, "context 64, and 8192 in the catalog"),
        ({"cache_bytes": 32}, "cache bytes 16, and 32 in the catalog"),
        ({"license": "Apache-2.0"}, "license llama3.2, and apache-2.0 in the catalog"),
        ({"vocabulary": 7}, "vocabulary 6, and 7 in the catalog"),
        ({"hidden": 16}, "hidden size 8, and 16 in the catalog"),
        (
            {"source": HubName("org/model-GGUF", "Q2_K")},
            "org/model-GGUF has no Q2_K; it has Q4_K_M",
        ),
        ({"bytes": 1, "context": 1}, f"{len(MODEL):,} bytes, and 1 in the catalog; context 64, and 1 in the catalog"),
    ],
)
def test_each_field_is_compared(check: Check, changes: dict[str, Any], difference: str) -> None:
    assert check(**changes) == (1, difference)


def test_repository_without_a_license_is_told(check: Check, hub: FakeHub) -> None:
    for tags in ([], ["gguf"], None, "license:llama3.2", [3]):
        hub.tags = tags
        assert check() == (1, "license not stated, and llama3.2 in the catalog")
    hub.repositories["org/model-GGUF"] = {"model-Q4_K_M.gguf": gguf(llama(general__license="llama3.2"), TENSORS)}
    assert check(bytes=len(gguf(llama(general__license="llama3.2"), TENSORS))) == (0, "as in the catalog")


def test_architecture_that_does_not_run_is_told(check: Check, hub: FakeHub) -> None:
    hub.repositories["org/model-GGUF"] = {"model-Q4_K_M.gguf": gguf(llama(general__architecture="glm4moe"))}
    status, found = check()
    assert status == 1
    assert found.startswith("right: the architecture 'glm4moe' does not run from GGUF")


def test_models_of_the_package_index_are_compared_with_the_files_here(check: Check, tmp_path: Path) -> None:
    source = catalog.Wheels(("wheel==1",), ("m.gguf",), 1000, "0" * 64)
    entry = msgspec.structs.replace(RIGHT, name="packaged", source=source, file="packaged.gguf")
    assert check(entry) == (1, "the model packaged is not here yet: run `syringa pull packaged`")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "packaged.gguf").write_bytes(MODEL)
    assert check(entry) == (0, "as in the catalog")
    content = gguf(llama(general__license="mit"), TENSORS)
    (tmp_path / "models" / "packaged.gguf").write_bytes(content)
    assert check(entry, bytes=len(content)) == (1, "license mit, and llama3.2 in the catalog")


def test_embedding_model_is_compared_with_its_folder(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "all-MiniLM-L6-v2"
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 32}
    config |= {"vocab_size": 30_522, "hidden_size": 384}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n")
    (folder / "model.safetensors").write_bytes(bytes(5000))
    monkeypatch.setattr(sys.modules[locate.__module__], "_package_folders", lambda name: [])
    entry = next(model for model in catalog.CATALOG if model.name == "embedding")
    assert check(entry, bytes=5000, context=32) == (0, "as in the catalog")
    assert check(entry, bytes=5000, context=64) == (1, "context 32, and 64 in the catalog")
