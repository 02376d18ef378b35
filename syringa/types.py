"""The values that pass between layers. No layer's own vocabulary appears here.

A `GenerationRequest` is what an endpoint asks for, an `EngineRequest` is one prompt of it on its way to an engine, and
`EngineDelta` is what comes back, a step at a time.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["regex", "json_schema", "lark", "llguidance"]
FinishReason = Literal["stop", "length", "abort", "error"]
Fault = Literal["engine", "grammar", "overload"]


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the generated text. For `json_schema` and `llguidance`, `value` is JSON text."""

    kind: GrammarKind
    value: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Token-level only: strings were resolved to ids before the engine sees them."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: frozenset[int] = frozenset()  # ids of tokens that end a repeated run
    grammar: Grammar | None = None
    # Where an answer begins with the first of these tokens, or with several, each is taken whenever it is likeliest,
    # and not left to the draw: whether a function is called is a decision, and no matter of style.
    opening: tuple[int, ...] = ()


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When a choice ends. `end_tokens` are the model's own, `stop_tokens` the request's."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    end_tokens: frozenset[int] = frozenset()
    stop_tokens: frozenset[int] = frozenset()


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A picture in a prompt: the bytes of a file that was checked (PNG, JPEG, WebP or GIF), and how closely to look."""

    data: bytes
    digest: bytes  # of the content; with `detail` it says whether two are the same
    detail: Literal["low", "high", "auto"] = "auto"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, to be continued `choices` times."""

    id: str
    prompt: list[int]
    sampling: Sampling
    stopping: Stopping
    choices: int = 1
    logprobs: int | None = None  # alternatives to report with each generated token; 0: only the token's own
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # For each the prompt has the model's own placeholder, once; the engine puts as many tokens there as it takes.
    images: tuple[Image, ...] = ()
    tenant: str = ""  # whose turn it is: tokens are shared out fairly between tenants
    use_cache: bool = True  # whether computed prompt blocks may be reused and kept


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The model's own log-probability of a token, before any sampling rule, and those of the best alternatives."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class EngineDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one choice. The last delta of a choice has `finish`."""

    request: str
    choice: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    stop_token: int | None = None  # the end or stop token that ended the choice; it is also the last of `tokens`
    cached_tokens: int = 0  # prompt tokens that were not computed again; on a choice's first delta
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # on the first delta of the first choice
    error: str | None = None
    fault: Fault = "engine"  # whose, where there is an error
    prompt_tokens: int = 0  # with images in their places; on the first delta of the first choice, if there are any
    queued_ms: int = 0  # between its arrival and the first step for it; on the first delta of the first choice

    @property
    def only_token(self) -> int | None:
        """The token, if there is nothing but one token of the first choice to tell."""
        tokens = self.tokens
        return tokens[0] if len(tokens) == 1 and self == EngineDelta(self.request, 0, tokens) else None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine, and its counters since it started."""

    running: int = 0
    waiting: int = 0
    queue_tenants: int = 0  # how many tenants those who wait belong to
    idle_seconds: float = 0.0  # since the last step or request; 0 while there is anything to do
    blocks_total: int = 0
    blocks_free: int = 0  # neither in use nor holding a cached prefix
    blocks_cached: int = 0  # reusable prefixes that nobody uses at the moment
    block_size: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started: int = 0  # requests of which some token was computed
    queue_seconds: float = 0.0  # that these had waited by then, in all
    refused: int = 0  # requests turned away because too much was waiting, or for too long


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of the model it has loaded."""

    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    parameters: int
    kernels: str
    threads: int
    load_seconds: float
