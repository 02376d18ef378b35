"""An engine without a model and a byte tokenizer, for tests of the HTTP layer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import AsyncGenerator, Iterable

import tokenizers

from syringa.api.models.served_model import ServedModel
from syringa.engine.interface import DeltaHandler, ReadyModel
from syringa.errors import EngineUnavailable
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.tokens.control_tokens import ControlTokens
from syringa.types import (
    EmbeddingRequest,
    EmbeddingResult,
    EngineDelta,
    EngineRequest,
    EngineStats,
    ModelInfo,
    ModelKind,
    TokenLogprobs,
)

END, START, VOCAB = 256, 257, 258


class ByteTokenizer:
    """A tokenizer with a token per byte, an end token and a start token."""

    vocab_size = VOCAB
    special_ids = frozenset({END, START})
    lark_vocabulary = LarkVocabulary({"<end>": END, "<start>": START})
    control_tokens = ControlTokens(tokenizers.Tokenizer(tokenizers.models.BPE()), 0)
    strips_leading_space = False
    longest_token = 7
    bytes_table = [bytes([each]) for each in range(256)] + [b"<end>", b"<start>"]
    text_table = [chr(each) if each < 128 else None for each in range(256)] + [None, None]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return b"".join(self.bytes_table[each] for each in ids if each < 256 or not skip_special).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, id_: int) -> bytes:
        return self.bytes_table[id_]

    def token_id(self, text: str) -> int | None:
        return {"<end>": END, "<start>": START}.get(text)

    def tokens_containing(self, text: str) -> frozenset[int]:
        return frozenset(text.encode())


def fake_model(**kwargs: object) -> ServedModel:
    given: dict = {"id": "fake", "tokenizer": ByteTokenizer(), "max_model_len": 4096, "aliases": ("alias",)}
    return ServedModel(**(given | {"end_tokens": frozenset({END}), "bos_token": START} | kwargs))


class FakeEngine:
    """Continue every prompt with `script`, or with random bytes by the seed, and record requests and aborts.

    The tokens that a resumed request has already must be the beginning of what this engine would generate.
    """

    def __init__(self, script: str | bytes | None = None, *, delay: float = 0.0, at_once: int = 1) -> None:
        self.ready = True
        self.delay, self.at_once = delay, at_once
        self.script = script.encode() if isinstance(script, str) else script
        self.fail: Exception | None = None  # raised after the first delta, or at once where `fail_first`
        self.fail_first = False
        self.queued_ms = 0  # reported queue time
        self.image_tokens = 1  # of an image
        self.kind: ModelKind = "generate"
        self.dimensions = 0  # of `embed`
        self.requests: list[EngineRequest] = []
        self.embedded: list[EmbeddingRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.running: set[tuple[str, int]] = set()
        self.delivered = 0  # deltas
        self._resumed = asyncio.Event()
        self._resumed.set()

    def pause(self) -> None:
        """Generate no tokens until `resume` is called. Requests are accepted and count as running."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        if not self.ready:
            raise EngineUnavailable("The model is loading.")
        info = ModelInfo(
            architecture="Fake", dtype="int8", max_model_len=4096, vocab_size=VOCAB, parameters=0, kernels="none",
            threads=1, load_seconds=0.0, kind=self.kind, dimensions=self.dimensions,
        )  # fmt: skip
        return ReadyModel(info)

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        running = set(request.open_choices)
        try:
            async with contextlib.aclosing(self.deltas(request)) as deltas:
                async for delta in deltas:
                    if delta.finish is not None:
                        running.discard(delta.choice)
                    done = on_delta(delta)
                    self.delivered += 1
                    if done:
                        return
        finally:
            running -= {choice for id_, choice in self.aborted if id_ == request.id}
            if running:
                self.abort(request.id)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return made-up vectors of `dimensions` values, 4 if it is 0, which depend on each input alone."""
        self.embedded.append(request)
        key = (request.id, 0)
        self.running.add(key)
        try:
            await asyncio.sleep(self.delay)
            await self._resumed.wait()
            if self.fail is not None:
                raise self.fail
        except asyncio.CancelledError:
            self.aborted.append((request.id, None))
            raise
        finally:
            self.running.discard(key)
        width = self.dimensions or 4
        values = [each for tokens in request.inputs for each in fake_vector(tokens, width)]
        return EmbeddingResult(request.id, width, struct.pack(f"<{len(values)}f", *values), self.queued_ms)

    async def deltas(self, request: EngineRequest) -> AsyncGenerator[EngineDelta]:
        self.requests.append(request)
        if self.fail is not None and self.fail_first:
            raise self.fail
        if request.count_only:
            yield EngineDelta(request.id, 0, finish="length", prompt_tokens=self.prompt_length(request))
            return
        remaining = {each: self.remaining_tokens(request, each) for each in request.open_choices}
        self.running |= {(request.id, each) for each in remaining}
        started, step = time.monotonic(), 0
        try:
            while remaining:
                await self.wait_for_step(started, step)
                await self._resumed.wait()
                for choice, tokens_left in list(remaining.items()):
                    if (request.id, choice) not in self.running:
                        del remaining[choice]
                        continue
                    taken, remaining[choice] = tokens_left[: self.at_once], tokens_left[self.at_once :]
                    yield self._delta(request, choice, taken, left=bool(remaining[choice]), first=step == 0)
                    if not remaining[choice]:
                        del remaining[choice]
                step += 1
                if self.fail is not None:
                    raise self.fail
        finally:
            self.running -= {key for key in self.running if key[0] == request.id}

    async def wait_for_step(self, started: float, step: int) -> None:
        """Wait until a step may run, the first of a request that was `started` at this monotonic time being 0."""
        await asyncio.sleep(self.delay)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborted.append((request_id, choice))
        self.running -= {key for key in self.running if key[0] == request_id and choice in (None, key[1])}

    async def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), started=len(self.requests))

    async def close(self) -> None:
        self.running.clear()

    def prompt_length(self, request: EngineRequest) -> int:
        return len(request.prompt) + (self.image_tokens - 1) * len(request.images)

    def output_tokens(self, request: EngineRequest, choice: int) -> list[int]:
        draw = random.Random(f"{request.sampling.seed} {choice} {request.prompt}")
        script = self.script
        if script is None:
            script = "".join(draw.choices("abcde é😀\n", k=draw.randrange(0, 30))).encode()
        tokens = [*script] if request.stopping.ignore_eos else [*script, END]
        if request.stopping.ignore_eos and tokens:
            tokens = (tokens * (request.stopping.max_tokens // len(tokens) + 1))[: request.stopping.max_tokens]
        return tokens[: request.stopping.max_tokens]

    def remaining_tokens(self, request: EngineRequest, choice: int) -> list[int]:
        """Return the tokens of a choice that a resumed request does not have already."""
        tokens = self.output_tokens(request, choice)
        before = request.resumed[choice].tokens if request.resumed else []
        assert tokens[: len(before)] == before, f"choice {choice} is resumed with {before}, and not {tokens}"
        return tokens[len(before) :]

    def _delta(self, request: EngineRequest, choice: int, taken: list[int], *, left: bool, first: bool) -> EngineDelta:
        ended = bool(taken) and taken[-1] == END
        finish = None if left else ("stop" if ended else "length")
        prompt = None
        if first and choice == request.open_choices[0] and request.prompt_logprobs is not None:
            prompt = [None, *(score(each, request.prompt_logprobs) for each in request.prompt[1:])]
        scores = [] if request.logprobs is None else [score(each, request.logprobs) for each in taken]
        begins = first and not request.resumed
        return EngineDelta(
            request.id, choice, taken, scores, finish, END if ended else None,
            len(request.prompt) // 2 if begins else 0, prompt,
            queued_ms=self.queued_ms if begins and choice == 0 else 0,
            prompt_tokens=self.prompt_length(request) if begins and choice == 0 and request.images else 0,
        )  # fmt: skip


def fake_vector(tokens: list[int], width: int) -> list[float]:
    """Return a vector of length 1 that depends on the tokens alone."""
    draw = random.Random(f"{tokens}")
    values = [draw.uniform(-1.0, 1.0) for _ in range(width)]
    length = sum(each * each for each in values) ** 0.5
    return [each / length for each in values]


def score(token: int, top: int) -> TokenLogprobs:
    """Return a made-up log-probability that depends on the token alone."""
    return TokenLogprobs(token, -token / 64, [((token + each) % 250, -token / 64 - each) for each in range(top)])
