"""The values that pass between the engine and the layers above it.

An endpoint builds a `GenerationRequest`, each prompt of it becomes an `EngineRequest`, and the engine answers with one
`EngineDelta` per step and choice.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal, NamedTuple

import msgspec

in_background: ContextVar[bool] = ContextVar("in_background", default=False)
"""Whether what prepares the current request runs only when nothing else does: it is a line of a batch."""

GrammarKind = Literal["regex", "json_schema", "lark", "llguidance"]
FinishReason = Literal["stop", "length", "abort", "error"]
ModelKind = Literal["generate", "embed", "score"]
ErrorKind = Literal["engine", "grammar", "overload", "out_of_memory", "no_token", "unavailable"]
Isolation = Literal["none", "start", "full"]
LoadPhase = Literal["queued", "fetching", "starting", "weights", "warmup"]  # in this order
"""How long a request is computed alone: not, until its first token, or to its end."""


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the generated text. For `json_schema` and `llguidance`, `value` is JSON text."""

    kind: GrammarKind
    value: str
    memory: int = 0  # bytes that it takes when it is compiled, as measured by a probe; 0: unknown


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Everything is in token ids: strings are resolved before the engine sees them."""

    seed: int
    seeded: bool = False  # whether the request gave the seed; otherwise it is random
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_tokens: frozenset[int] = frozenset()  # the only tokens that may be sampled; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output may not contain
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: frozenset[int] = frozenset()  # ids of tokens that end a repeated run
    grammar: Grammar | None = None
    # While the output is a prefix of these tokens, the next of them is taken if it is the most likely token, instead of
    # being sampled: whether a tool is called should not depend on the temperature.
    opening: tuple[int, ...] = ()


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When a choice ends. `end_tokens` are the model's own, `stop_tokens` the request's."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    end_tokens: frozenset[int] = frozenset()
    stop_tokens: frozenset[int] = frozenset()


class Image(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """An image of a prompt: the bytes of a validated file (PNG, JPEG, WebP or GIF), and the level of detail."""

    data: bytes
    digest: bytes  # of the content; with `detail` it identifies the image in caches
    detail: Literal["low", "high", "auto"] = "auto"


class ResumedChoice(msgspec.Struct, frozen=True, array_like=True):
    """The state of a choice that another worker began."""

    tokens: list[int] = []  # generated so far, in order
    finished: bool = False  # whether it has ended or was aborted, and is not run again


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, to be completed `choices` times."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    stopping: StopConditions
    choices: int = 1
    logprobs: int | None = None  # alternatives to report with each generated token; 0: only the token's own
    logprob_tokens: tuple[int, ...] = ()  # with `logprobs`: these are the alternatives, not the most likely tokens
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # The prompt has one placeholder token per image, which the engine expands to as many as the image needs.
    images: tuple[Image, ...] = ()
    count_only: bool = False  # with images: only report `prompt_tokens`, in a delta that finishes the request
    tenant: str = ""  # the scheduler is fair between tenants
    priority: int = 0  # among the waiting requests of the tenant; lower comes first
    background: bool = False  # computed only with what other requests leave, and preempted first
    waited: float = 0.0  # seconds for which it has waited for a worker, and at other ones without having begun
    # Cached prefixes, images and grammars are found only by requests with the same key, see `generation.cache_key`.
    cache_key: bytes = b""
    use_cache: bool = True  # whether the prefix cache may be used for it
    fingerprint: bytes = b""  # identifies the tenant and content of the request, whenever it comes
    isolation: Isolation = "none"
    # One for each choice of a request that another worker began: deltas have only the tokens that follow, and neither
    # `cached_tokens`, `prompt_tokens` nor `queued_ms`. Empty: a new request.
    resumed: tuple[ResumedChoice, ...] = ()

    @property
    def open_choices(self) -> list[int]:
        """The choices to run: all of a new request, the unfinished ones of a resumed one."""
        if not self.resumed:
            return list(range(self.choices))
        return [index for index, choice in enumerate(self.resumed) if not choice.finished]

    @property
    def longest_resumed(self) -> int:
        """The largest number of tokens that an open choice already has."""
        return max((len(choice.tokens) for choice in self.resumed if not choice.finished), default=0)


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed, or pairs of texts to score, in one request."""

    id: str
    inputs: list[list[int]]  # token ids with special tokens, each within the model's length
    # For pairs: the index in each input at which the second text begins, which has another token type. Empty: no pairs.
    second: list[int] = []
    tenant: str = ""  # the scheduler is fair between tenants
    priority: int = 0  # among the waiting requests of the tenant; lower comes first
    background: bool = False  # runs only when nothing else waits
    waited: float = 0.0  # seconds for which it has waited for a worker, and at other ones
    fingerprint: bytes = b""  # identifies the tenant and content of the request, whenever it comes
    isolated: bool = False  # computed in steps of its own: it was in the last step of a worker that crashed


class EmbeddingResult(msgspec.Struct, frozen=True, array_like=True):
    """The vectors of a request's inputs: pooled and normalized embeddings, or the logits of a cross-encoder."""

    request_id: str
    width: int  # values per input: the dimensions of an embedding, or the number of labels
    values: bytes  # float32, little-endian, in the order of the inputs
    queued_ms: int = 0  # from the request's arrival to its first step


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The model's own log-probability of a token, before any sampling rule, and those of the best alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0  # of the token among all, 1 for the most likely; known for tokens of prompts only


class EngineDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one step added to one choice. The last delta of a choice has `finish`."""

    request_id: str
    choice: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    stop_token: int | None = None  # the end or stop token that ended the choice; it is also the last of `tokens`
    cached_tokens: int = 0  # prompt tokens that were not computed again; on a choice's first delta
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first delta of the first choice
    error: str | None = None
    error_kind: ErrorKind = "engine"
    prompt_tokens: int = 0  # with expanded placeholders; on the first delta of the first choice, if it has images
    queued_ms: int = 0  # from the request's arrival to its first step; on the first delta of the first choice


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """The number of observations in each bucket, the last of which has no upper bound, and their sum."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of an engine, and its counters since the start."""

    running: int = 0
    waiting: int = 0
    preparing: int = 0  # of the waiting requests, those whose grammar or images are being prepared
    queue_tenants: int = 0  # number of tenants with waiting requests
    idle_seconds: float = 0.0  # since the last step or request; 0 while busy
    blocks_total: int = 0
    blocks_free: int = 0  # neither in use nor holding a cached prefix
    blocks_cached: int = 0  # unreferenced blocks that hold a cached prefix
    state_slots: int = 0  # of a hybrid model's state cache
    state_slots_free: int = 0  # neither of a sequence nor with a snapshot
    state_snapshots: int = 0
    block_size: int = 0
    prefix_caching: bool = True
    max_length: int = 0  # of a sequence, in tokens
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: HistogramCounts = HistogramCounts()  # tokens that a step computed
    token_gaps: HistogramCounts = HistogramCounts()  # seconds between two tokens of a sequence
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started: int = 0  # requests that were scheduled at least once
    queue_seconds: float = 0.0  # total time that these waited before
    refused: int = 0  # requests refused because the queue was full or they waited too long


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's description of its loaded model."""

    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    parameters: int
    kernels: str
    threads: int
    load_seconds: float
    kind: ModelKind = "generate"
    dimensions: int = 0  # of an embedding model's vectors; the number of labels where the kind is "score"


class LoadProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a model is in being loaded."""

    phase: LoadPhase
    fraction: float | None = None  # of the phase that is done; None: not known


class ModelLoading(NamedTuple):
    """A model that is being loaded."""

    progress: LoadProgress
    seconds: float  # since loading was asked for
