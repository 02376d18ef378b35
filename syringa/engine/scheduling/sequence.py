"""One choice on its way: its tokens, how many are computed, and where they lie."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syringa.engine.sampling.rows import SamplerState, SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.types import EngineRequest, FinishReason, Stopping, TokenLogprobs

if TYPE_CHECKING:
    from syringa.engine.structured_output.compiler import GrammarState
    from syringa.engine.vision.images import Pictures

_arrivals = itertools.count()
PENDING = -1  # stands for a token that the device has drawn and the host has not read


@dataclass(eq=False, slots=True)
class Sequence:
    request: EngineRequest
    choice: int
    state: SamplerState
    grammar: GrammarState | None = None
    origin: int = 0  # which client sent it
    tokens: list[int] = field(default_factory=list)  # prompt and output
    computed: int = 0  # how many of them have their keys and values in the cache
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)  # of the leading blocks that are complete
    cached: int = -1  # prompt tokens found in the cache when it first ran; -1: it has not
    siblings: int = 0  # choices that fork from this one once the prompt is computed
    prompt_scores: list[TokenLogprobs | None] | None = None  # collected as the prompt is computed
    arrival: int = field(default_factory=lambda: next(_arrivals))
    begun: bool = False  # whether a step has computed any of it, be it lost since
    submitted: float = 0.0  # when its request came
    queued: float = 0.0  # seconds from then to the first step for it
    started: bool = False  # whether a delta was sent
    pictures: Pictures | None = None  # the images in the prompt
    pending: bool = False  # whether the last token is `PENDING`
    spent: bool = False  # whether the choice ends with that token, whatever it will be
    ended: bool = False  # whether it is gone; a draw may still be under way

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def needed(self) -> int:
        return 0 if self.spent else len(self.tokens) - self.computed

    @property
    def known(self) -> int:
        """How many of its tokens the host knows."""
        return len(self.tokens) - self.pending

    @property
    def scoring(self) -> bool:
        """Whether the prompt's own log-probabilities are still being collected."""
        return self.prompt_scores is not None and len(self.prompt_scores) < self.prompt_length

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come now, because the answer would be shorter than was asked for."""
        stopping = self.request.stopping
        if self.generated >= stopping.min_tokens:
            return frozenset()
        return stopping.end_tokens | stopping.stop_tokens

    @property
    def favoured(self) -> int | None:
        """The next token of the request's opening, as long as nothing else was written."""
        opening, count = self.request.sampling.opening, self.generated
        if count >= len(opening) or tuple(self.tokens[self.prompt_length :]) != opening[:count]:
            return None
        return opening[count]

    @property
    def needs_host(self) -> bool:
        """Whether drawing the next token takes more than its logits and noise."""
        request = self.request
        if self.state.edits or self.grammar is not None or request.logprobs is not None:
            return True
        return self.generated < max(request.stopping.min_tokens, len(request.sampling.opening))

    def add(self, token: int) -> None:
        """The token that was drawn, be it expected or not."""
        if self.pending:
            self.tokens[-1] = token
            self.pending = self.spent = False
        else:
            self.tokens.append(token)

    def sampling_row(self) -> SamplingRow:
        """What the sampler has to know to draw the next token."""
        return SamplingRow(self.state, self.choice, self.generated, self.request.logprobs, self.banned, self.favoured)

    def blocks_for(self, tokens: int) -> int:
        """How many more blocks `tokens` computed tokens would need."""
        return -(-tokens // BLOCK_SIZE) - len(self.blocks)

    def prefix_in(self, pool: BlockPool) -> tuple[list[int], list[bytes]]:
        """The blocks that hold its longest known prefix, and their names. An image is in it whole or not at all."""
        if self.pictures is None:
            return pool.find(self.tokens)
        blocks, names = pool.find(self.tokens, self.pictures.mark)
        count = len(blocks)
        while (begin := self.pictures.chunk_begin(count * BLOCK_SIZE)) < count * BLOCK_SIZE:
            count = begin // BLOCK_SIZE
        return blocks[:count], names[:count]

    def fork(self, choice: int) -> Sequence:
        """A sibling with the same tokens and blocks. The caller counts the blocks' users."""
        return Sequence(
            request=self.request,
            choice=choice,
            state=self.state.fork(),
            grammar=self.grammar.fork() if self.grammar else None,
            origin=self.origin,
            tokens=list(self.tokens),
            computed=self.computed,
            blocks=list(self.blocks),
            names=list(self.names),
            cached=self.cached,
            arrival=self.arrival,
            begun=self.begun,
            pictures=self.pictures,
        )


def check_stop(stopping: Stopping, token: int, generated: int, room: int) -> FinishReason | None:
    """Why a choice ends with `token`, its `generated`th; `room` is what the context leaves after it."""
    if generated >= stopping.min_tokens:
        if token in stopping.stop_tokens:
            return "stop"
        if token in stopping.end_tokens and not stopping.ignore_eos:
            return "stop"
    if generated >= stopping.max_tokens or room <= 0:
        return "length"
    return None
