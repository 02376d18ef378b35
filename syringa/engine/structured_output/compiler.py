"""Structured output: grammars compiled by llguidance outside of the step loop, and token masks for a batch.

With `masks` and `grammar_tokenizer`, the only modules of the engine that use llguidance. A grammar that is too complex,
or a token that it does not allow, sets the error of that one sequence's state; nothing raises in the step loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from syringa.engine.structured_output.grammar_tokenizer import build_grammar_tokenizer
from syringa.engine.structured_output.masks import MaskFiller
from syringa.fair_thread_pool import FairThreadPool
from syringa.grammar import invalid_grammar, parser_limits, plain_message, to_llguidance
from syringa.grammar.lark import resolve_special_tokens
from syringa.heap import trim_heap
from syringa.types import Grammar

CACHE_BYTES = 256 << 20  # of compiled grammars, as measured by the grammar probe
UNKNOWN_BYTES = 4 << 20  # charged for a grammar that was not measured


@dataclass(frozen=True, slots=True)
class _CompiledGrammar:
    matcher: LLMatcher  # in its initial state, only ever copied
    first_mask: np.ndarray


class GrammarState:
    """The position of one sequence in its grammar."""

    __slots__ = ("_failure", "grammar", "matcher", "next_mask")

    def __init__(self, grammar: _CompiledGrammar, matcher: LLMatcher, next_mask: np.ndarray | None) -> None:
        self.grammar = grammar
        self.matcher = matcher
        # A copied matcher loses the lexer states that computing the mask has built, which can take long.
        self.next_mask = next_mask
        self._failure: str | None = None

    def accept(self, token: int) -> bool:
        """Advance by a sampled token. Return False, with `error` set, if the grammar does not allow it."""
        self.next_mask = None
        return self._failure is None and bool(self.finished or self.matcher.consume_token(token))

    def fail(self, reason: str) -> None:
        """Set an error that does not come from the matcher."""
        self._failure = reason

    @property
    def finished(self) -> bool:
        """Whether no token can follow: the choice ends, whatever its stop conditions say."""
        return bool(self.matcher.is_stopped()) and self.error is None

    @property
    def accepting(self) -> bool:
        """Whether the text so far satisfies the grammar, and the end token is allowed."""
        return bool(self.matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why this sequence cannot go on; None if it can. To be checked after `accept` and after `fill_masks`."""
        if self._failure is not None or not self.matcher.is_error():
            return self._failure
        return f"The grammar cannot go on: {plain_message(self.matcher.get_error())}"

    def fork(self) -> GrammarState:
        return GrammarState(self.grammar, self.matcher.deep_copy(), self.next_mask)


def _build_tokenizer(tokenizer_json: str, vocab_size: int, eos_tokens: Collection[int]) -> LLTokenizer:
    tokenizer = build_grammar_tokenizer(tokenizer_json, vocab_size, sorted(eos_tokens))
    trim_heap()  # of the model's tokenizer, too, which was loaded for `tokenizer_json` and is gone
    return tokenizer


class GrammarCompiler:
    """Compile grammars for one tokenizer, in threads of its own, and cache the recent ones.

    `vocab_size` is the number of logits that masks cover; `eos_tokens` are allowed where a grammar may end.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_tokens: Collection[int],
        *,
        threads: int = 2,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._vocab_size = vocab_size
        # By the request's cache key too: how soon a grammar is ready must not tell a tenant what another one uses.
        self._cache: OrderedDict[tuple[bytes, Grammar], tuple[Future[_CompiledGrammar], int]] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._lock = threading.Lock()
        self._limits = parser_limits()
        self._filler = MaskFiller(threads)
        self._pool = FairThreadPool(threads, "grammar", per_tenant=max(1, threads - 1))
        # Building the tokenizer's trie takes up to a second, which delays neither the start nor the first request.
        self._tokenizer = self._pool.submit("", lambda: _build_tokenizer(tokenizer_json, vocab_size, eos_tokens))

    def compile(
        self,
        grammar: Grammar,
        tenant: str = "",
        cache_key: bytes = b"",
        output: Sequence[int] = (),
        *,
        background: bool = False,
    ) -> Future[GrammarState]:
        """Return a future state after the tokens of `output`, with its next mask.

        The future may raise `InvalidRequest`. An `output` that the grammar does not allow sets the state's error.
        Compilations are fair between tenants: one with a thousand grammars does not block the others. Those of requests
        in the `background` begin when no other can. Only a request
        with the same cache key gets a grammar from the cache.
        """
        return self._pool.submit(tenant, lambda: self._start(grammar, cache_key, output), background=background)

    def fill_masks(self, states: Sequence[GrammarState | None]) -> torch.Tensor:
        """Return the token mask of each row as int32 bits on the host; all tokens for rows without a grammar.

        Runs in Rust threads without the GIL. A state that fails gets an empty mask, and has `error` set.
        """
        masks = allocate_token_bitmask(len(states), self._vocab_size)
        requests: list[tuple[GrammarState, int]] = []
        for i, state in enumerate(states):
            if state is None:
                continue
            if state.next_mask is not None:
                masks[i] = state.next_mask
            else:
                requests.append((state, i))
        self._filler.fill(requests, masks)
        return torch.from_numpy(masks)

    def close(self) -> None:
        self._pool.close()
        self._filler.close()

    def _start(self, grammar: Grammar, cache_key: bytes, output: Sequence[int]) -> GrammarState:
        entry, is_new = self._cache_entry((cache_key, msgspec.structs.replace(grammar, memory=0)), grammar.memory)
        if is_new:
            try:
                entry.set_result(self._compile(grammar))
            except BaseException as error:  # other requests wait for this entry
                entry.set_exception(error)
        compiled = entry.result()
        state = GrammarState(compiled, compiled.matcher.deep_copy(), compiled.first_mask)
        if output:
            self._replay(state, output)
        return state

    def _replay(self, state: GrammarState, output: Sequence[int]) -> None:
        """Advance a state by tokens that were generated before, and compute its next mask, if it has no error."""
        if all(state.accept(token) for token in output):
            mask = allocate_token_bitmask(1, self._vocab_size)
            fill_next_token_bitmask(state.matcher, mask)
            if not state.matcher.is_error():
                state.next_mask = mask[0]

    def _cache_entry(self, key: tuple[bytes, Grammar], memory: int) -> tuple[Future[_CompiledGrammar], bool]:
        """Return the entry of a grammar, and whether it is new. `memory` is what the compiled grammar will take."""
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known[0], False
            entry: Future[_CompiledGrammar] = Future()
            charge = (
                (memory or UNKNOWN_BYTES) + len(key[1].value) + self._vocab_size // 8
            )  # the text and the first mask
            self._cache[key] = entry, charge
            self._cached_bytes += charge
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, (_, freed) = self._cache.popitem(last=False)
                self._cached_bytes -= freed
            return entry, True

    def _compile(self, grammar: Grammar) -> _CompiledGrammar:
        tokenizer, special = self._tokenizer.result()
        matcher = LLMatcher(
            tokenizer, to_llguidance(resolve_special_tokens(grammar, special)), log_level=0, limits=self._limits
        )
        mask = allocate_token_bitmask(1, self._vocab_size)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise invalid_grammar(matcher.get_error())
        return _CompiledGrammar(matcher, mask[0])
