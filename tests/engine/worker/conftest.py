"""Engines on the tiny model, whose steps take less than a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from syringa.engine.loading.loaded_model import LoadedModel
    from syringa.engine.worker.core import EngineCore


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Return a function that loads the tiny model in a precision, once."""
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model
    from tests.engine.worker.tiny_llama import save_tiny_llama

    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    loaded: dict[str, LoadedModel] = {}

    def get(dtype: str) -> LoadedModel:
        if dtype not in loaded:
            loaded[dtype] = load_model(LoadOptions(model=str(folder), dtype=dtype, device="cpu"))
        return loaded[dtype]

    return get


@pytest.fixture
def tiny_engine(load_tiny: Callable[[str], LoadedModel]) -> Iterator[Callable[..., EngineCore]]:
    """Return a function that builds an engine on the tiny model: `tiny_engine(limits, dtype=…, kv_cache_tokens=…)`."""
    from syringa.engine.worker.core import EngineCore
    from tests.engine.worker.tiny_llama import tiny_tokenizer

    made: list[EngineCore] = []

    def make(limits: Any = None, *, dtype: str = "int8", **options: Any) -> EngineCore:
        options = {"kv_cache_tokens": 2048, "tokenizer_json": tiny_tokenizer().to_str} | options
        made.append(EngineCore(load_tiny(dtype), limits, **options))
        return made[-1]

    yield make
    for core in made:
        core.close()
