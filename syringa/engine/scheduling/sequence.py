"""A sequence: one choice of a request, with its tokens, its block table and its progress. Torch-free."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syringa.engine.sampling.sampler_input import NO_TOKEN, SamplerState, SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.types import EngineRequest, FinishReason, SamplingParams, StopConditions, TokenLogprobs

if TYPE_CHECKING:
    from syringa.engine.structured_output.compiler import GrammarState
    from syringa.engine.vision.prompt_images import PromptImages

_arrivals = itertools.count()
PENDING_TOKEN = -1  # placeholder for a token that was sampled on the device and not yet read by the host


class StepTime:
    """When a step ended, which is not known while its tokens are processed."""

    __slots__ = ("ended_at",)

    def __init__(self) -> None:
        self.ended_at = 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    request: EngineRequest
    choice: int
    state: SamplerState
    grammar: GrammarState | None = None
    client_id: int = 0  # the client connection that sent the request
    tokens: list[int] = field(default_factory=list)  # prompt and output
    computed: int = 0  # number of tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks
    cached: int = -1  # prompt tokens found in the prefix cache on first admission; -1: not admitted yet
    siblings: int = 0  # choices that fork from this one once the prompt is computed
    prompt_scores: list[TokenLogprobs | None] | None = None  # collected as the prompt is computed
    arrival: int = field(default_factory=lambda: next(_arrivals))
    begun: bool = False  # whether a step has ever included it, here or, if it is resumed, in another worker
    submitted: float = 0.0  # when the request arrived
    queue_seconds: float = 0.0  # from then to its first step
    last_step: StepTime | None = None  # that of its last delta; None: it has sent none
    prompt_images: PromptImages | None = None
    state_slot: int = -1  # in the state cache of a hybrid model; -1: none
    snapshot_positions: list[int] = field(default_factory=list)  # at which its state is to be saved, ascending
    unsaved_snapshots: list[tuple[int, int]] = field(default_factory=list)  # (position, slot) without a known hash
    pending: bool = False  # whether the last token is `PENDING_TOKEN`
    ends_with_pending: bool = False  # whether the choice ends with that token, whatever it is
    finished: bool = False  # whether it was dropped; a step in flight may still sample for it

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def needed(self) -> int:
        """Number of tokens still to be computed."""
        return 0 if self.ends_with_pending else len(self.tokens) - self.computed

    @property
    def known(self) -> int:
        """Number of tokens whose ids the host knows."""
        return len(self.tokens) - self.pending

    @property
    def scoring(self) -> bool:
        """Whether prompt log-probabilities are still being collected."""
        return self.prompt_scores is not None and len(self.prompt_scores) < self.prompt_length

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that are excluded until `min_tokens` is reached."""
        stopping = self.request.stopping
        if self.generated >= stopping.min_tokens:
            return frozenset()
        return stopping.end_tokens | stopping.stop_tokens

    @property
    def preferred(self) -> int | None:
        """The next token of the request's `opening`, while the output equals its beginning."""
        opening, count = self.request.sampling.opening, self.generated
        if count >= len(opening) or tuple(self.tokens[self.prompt_length :]) != opening[:count]:
            return None
        return opening[count]

    @property
    def needs_host(self) -> bool:
        """Whether sampling the next token needs more than its logits and noise."""
        request = self.request
        if self.state.needs_host or self.grammar is not None or request.logprobs is not None:
            return True
        return self.generated < max(request.stopping.min_tokens, len(request.sampling.opening))

    def add(self, token: int) -> None:
        """Append a sampled token, or fill it in for the pending one."""
        if self.pending:
            self.tokens[-1] = token
            self.pending = self.ends_with_pending = False
        else:
            self.tokens.append(token)

    def sampling_row(self) -> SamplingRow:
        """Return the sampler's input for the next token."""
        request = self.request
        return SamplingRow(
            self.state,
            self.choice,
            self.generated,
            request.logprobs,
            self.banned,
            self.preferred,
            request.logprob_tokens,
        )

    def missing_blocks(self, tokens: int) -> int:
        """Return how many blocks the block table lacks to hold `tokens` tokens."""
        return -(-tokens // BLOCK_SIZE) - len(self.block_table)

    def find_cached_prefix(self, pool: BlockPool) -> tuple[list[int], list[bytes]]:
        """Return the blocks of the longest cached prefix and their hashes, without splitting an image."""
        if self.prompt_images is None:
            return pool.find_prefix(self.request.cache_key, self.tokens)
        blocks, hashes = pool.find_prefix(self.request.cache_key, self.tokens, self.prompt_images.block_hash_extra)
        count = len(blocks)
        while (begin := self.prompt_images.chunk_begin(count * BLOCK_SIZE)) < count * BLOCK_SIZE:
            count = begin // BLOCK_SIZE
        return blocks[:count], hashes[:count]

    def fork(self, choice: int) -> Sequence:
        """Return a sibling with the same tokens and blocks. The caller adds the references to the blocks."""
        return Sequence(
            request=self.request,
            choice=choice,
            state=self.state.fork(),
            grammar=self.grammar.fork() if self.grammar else None,
            client_id=self.client_id,
            tokens=list(self.tokens),
            computed=self.computed,
            block_table=list(self.block_table),
            block_hashes=list(self.block_hashes),
            cached=self.cached,
            arrival=self.arrival,
            begun=self.begun,
            prompt_images=self.prompt_images,
        )


def check_stop(stopping: StopConditions, token: int, generated: int, context_left: int) -> FinishReason | None:
    """Return the finish reason if a choice ends with `token`, its `generated`th; None if it goes on.

    `context_left` is the number of positions that the context has after the token.
    """
    if generated >= stopping.min_tokens:
        if token in stopping.stop_tokens:
            return "stop"
        if token in stopping.end_tokens and not stopping.ignore_eos:
            return "stop"
    if generated >= stopping.max_tokens or context_left <= 0:
        return "length"
    return None


def no_token_message(sampling: SamplingParams) -> str:
    """Return the error of an output that no token can continue."""
    names = [("allowed_token_ids", sampling.allowed_tokens), ("bad_words", sampling.bad_words)]
    used = [name for name, value in names if value]
    if not used:
        return "The model gave no usable probabilities."
    rules = [*(["the constraint"] if sampling.grammar is not None else []), *used]
    return f"No token is left to continue the output under {' and '.join(rules)}."


def append_token(sequence: Sequence, token: int, max_length: int) -> tuple[list[int], FinishReason | None, str | None]:
    """Append a sampled token and advance the grammar. Return the new tokens, the finish reason and the error."""
    stopping, grammar = sequence.request.stopping, sequence.grammar
    if stopping.max_tokens == 0:  # only prompt log-probabilities were requested
        return [], "length", None
    if token == NO_TOKEN:
        if grammar is not None and grammar.accepting and not grammar.error:
            return [], "stop", None
        return [], "error", (grammar and grammar.error) or no_token_message(sequence.request.sampling)
    sequence.add(token)
    sequence.state.observe(token)
    finish = check_stop(stopping, token, sequence.generated, max_length - len(sequence.tokens))
    if grammar is not None and finish != "stop":
        grammar.accept(token)
        if grammar.error:
            return [token], "error", grammar.error
        if grammar.finished:
            finish = "stop"
    return [token], finish, None
