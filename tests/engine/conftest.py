"""Fixtures for the default model, loaded once per module and precision, and a driver for `EngineCore`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syringa.types import EngineDelta, EngineRequest, FinishReason, SamplingParams, StopConditions, TokenLogprobs

if TYPE_CHECKING:  # tests of torch-free modules should not import torch
    from tokenizers import Tokenizer

    from syringa.engine.loading.loaded_model import LoadedModel
    from syringa.engine.worker.core import EngineCore


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    """Make random numbers independent of the tests that ran before."""
    random.seed(0)
    for name in ("numpy", "torch"):
        if module := sys.modules.get(name):
            (module.manual_seed if name == "torch" else module.random.seed)(0)


@pytest.fixture(scope="module", autouse=True)
def _release_memory() -> Iterator[None]:
    """Return the memory of freed weights to the system after each module. glibc alone would keep gigabytes of it."""
    yield
    if "torch" in sys.modules:
        gc.collect()
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def load_gpu_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a folder as on a GPU with FP8, with all checks and reference operations."""
    import torch

    from syringa.engine.gpu import device as gpu_device
    from syringa.engine.gpu.ops import base as ops_module
    from syringa.engine.loading.gpu_model import load_on_gpu
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.modelfiles import describe, locate

    monkeypatch.setattr(ops_module, "choose_ops", lambda *_, **__: ops_module.ReferenceOps())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_device, "free_memory", lambda device: 8 << 30)

    def load(folder: Path, **options: Any) -> Any:
        files = locate(str(folder))
        return load_on_gpu(LoadOptions(str(folder), **options), files, describe(files), torch.device("cpu"), None)

    return load


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], LoadedModel]]:
    """Return a function that loads the default model in a precision, once. The weights are released with the module."""
    from syringa.engine.cpu.features import disable_broken_amx

    disable_broken_amx("bf16")
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model

    loaded: dict[str, LoadedModel] = {}

    def get(dtype: str) -> LoadedModel:
        if dtype not in loaded:
            loaded[dtype] = load_model(LoadOptions(dtype=dtype))
        return loaded[dtype]

    yield get
    loaded.clear()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from syringa.modelfiles import load_tokenizer, locate

    return load_tokenizer(locate("default"))


@pytest.fixture
def engine(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Iterator[Callable[..., EngineCore]]:
    """Return a function that builds an engine on the shared weights: `engine(dtype, limits, kv_cache_tokens=…)`."""
    from syringa.engine.worker.core import EngineCore

    made: list[EngineCore] = []

    def make(dtype: str = "int8", limits: Any = None, **options: Any) -> EngineCore:
        options = {"kv_cache_tokens": 4096, "tokenizer_json": tokenizer.to_str} | options
        made.append(EngineCore(load(dtype), limits, **options))
        return made[-1]

    yield make
    for core in made:
        core.close()


@dataclass
class Answer:
    """The accumulated deltas of a choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    deltas: list[EngineDelta] = field(default_factory=list)

    def add(self, delta: EngineDelta) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.deltas.append(delta)


Answers = dict[tuple[str, int], Answer]


def request(
    id_: str, prompt: list[int], *, seed: int = 0, max_tokens: int = 8, stopping: Any = None, **options: Any
) -> EngineRequest:
    """Build a request from a mix of its own fields and sampling parameters."""
    own = {name: options.pop(name) for name in list(options) if name in EngineRequest.__struct_fields__}
    return EngineRequest(
        id=id_,
        prompt=prompt,
        sampling=SamplingParams(seed=seed, **options),
        stopping=StopConditions(max_tokens=max_tokens, **(stopping or {})),
        **own,
    )


class Driver:
    """Step an engine and collect its deltas."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: Answers = defaultdict(Answer)

    def submit(self, *requests: EngineRequest) -> None:
        for each in requests:
            self.core.submit(each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for _, delta in self.core.step():
                self.answers[delta.request_id, delta.choice].add(delta)

    def finish(self, seconds: float = 120) -> Answers:
        """Step until nothing is left, and return the answers."""
        end = time.monotonic() + seconds
        while self.core.busy or self.core.stats().waiting:
            if not self.core.busy:
                time.sleep(0.001)  # a grammar is being compiled
            self.step()
            assert time.monotonic() < end, "the engine did not finish in time"
        return self.answers


def drive(core: EngineCore, requests: Iterable[EngineRequest]) -> Answers:
    """Submit all requests, and step until they are finished."""
    driver = Driver(core)
    driver.submit(*requests)
    return driver.finish()
