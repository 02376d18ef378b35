"""The real model, loaded once per precision, and a small driver for `EngineCore`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from syringa.types import EngineDelta, EngineRequest, FinishReason, Sampling, Stopping, TokenLogprobs

if TYPE_CHECKING:  # unit tests of torch-free modules must not wait for torch
    from tokenizers import Tokenizer

    from syringa.engine.loading.loader import LoadedModel
    from syringa.engine.worker.core import EngineCore


@pytest.fixture(scope="session")
def load() -> Callable[[str], LoadedModel]:
    """`load(dtype)` gives the default model, the same one each time."""
    from syringa.engine.cpu.features import guard_against_amx

    guard_against_amx("bf16")
    from syringa.engine.loading.loader import LoadOptions, load_model

    loaded: dict[str, LoadedModel] = {}

    def get(dtype: str) -> LoadedModel:
        if dtype not in loaded:
            loaded[dtype] = load_model(LoadOptions(dtype=dtype))
        return loaded[dtype]

    return get


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from syringa.modelfiles import load_tokenizer, locate

    return load_tokenizer(locate("default"))


@pytest.fixture
def engine(load: Callable[[str], LoadedModel], tokenizer: Tokenizer) -> Iterator[Callable[..., EngineCore]]:
    """`engine(dtype="int8", limits=…, kv_cache_tokens=…)`: a fresh engine on the shared weights."""
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
    """What a choice came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    deltas: list[EngineDelta] = field(default_factory=list)

    def add(self, delta: EngineDelta) -> None:
        assert self.finish is None, "a delta after the last"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.deltas.append(delta)


Answers = dict[tuple[str, int], Answer]


def request(
    id_: str, prompt: list[int], *, seed: int = 0, max_tokens: int = 8, stopping: Any = None, **options: Any
) -> EngineRequest:
    """A request with sampling options and the request's own mixed, as they come."""
    own = {name: options.pop(name) for name in list(options) if name in EngineRequest.__struct_fields__}
    return EngineRequest(
        id=id_,
        prompt=prompt,
        sampling=Sampling(seed=seed, **options),
        stopping=Stopping(max_tokens=max_tokens, **(stopping or {})),
        **own,
    )


class Driver:
    """Steps an engine and keeps what it says."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: Answers = defaultdict(Answer)

    def submit(self, *requests: EngineRequest) -> None:
        for each in requests:
            self.core.submit(each)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for _, delta in self.core.step():
                self.answers[delta.request, delta.choice].add(delta)

    def finish(self, seconds: float = 120) -> Answers:
        """Until nothing is left."""
        end = time.monotonic() + seconds
        while self.core.busy or self.core.stats().waiting:
            if not self.core.busy:
                time.sleep(0.001)  # a grammar is being compiled
            self.step()
            assert time.monotonic() < end, "the engine does not come to an end"
        return self.answers


def drive(core: EngineCore, requests: Iterable[EngineRequest]) -> Answers:
    """Submits all, and steps to the end."""
    driver = Driver(core)
    driver.submit(*requests)
    return driver.finish()
