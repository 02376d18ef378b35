"""Constrained decoding: llguidance's matchers, compiled off the step loop, and their masks for a whole batch.

With `masks` and `vocabulary`, the only place in the engine that knows llguidance. A grammar that turns out too complex,
or a token that does not fit, puts that one sequence's state into error; nothing here raises in the step loop for a
grammar's sake.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from syringa.engine.structured_output.masks import MaskFiller
from syringa.engine.structured_output.vocabulary import hide_special
from syringa.engine.vision.fair_pool import FairPool
from syringa.grammar import brief, invalid_grammar, lower, parser_limits
from syringa.grammar.lark import by_id
from syringa.types import Grammar


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher  # in its first state, only ever copied
    first_mask: np.ndarray


class GrammarState:
    """Where one sequence stands in its grammar."""

    __slots__ = ("_failure", "_first_mask", "grammar", "matcher")

    def __init__(self, grammar: _Compiled, matcher: LLMatcher, first_mask: np.ndarray | None) -> None:
        self.grammar = grammar
        self.matcher = matcher
        # A copied matcher has lost the lexer states that computing the first mask built, and that can take long.
        self._first_mask = first_mask
        self._failure: str | None = None

    def accept(self, token: int) -> bool:
        """Goes on by a drawn token, be it an end token. False, and `error` set, if the grammar does not allow it."""
        self._first_mask = None
        return self._failure is None and bool(self.finished or self.matcher.consume_token(token))

    def fail(self, reason: str) -> None:
        """It cannot go on, for a reason that is not in its matcher."""
        self._failure = reason

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: the choice ends, whatever its stopping rules say."""
        return bool(self.matcher.is_stopped()) and self.error is None

    @property
    def accepting(self) -> bool:
        """Whether the text so far satisfies the grammar, and the end token is allowed."""
        return bool(self.matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why this sequence cannot go on, if it cannot. To be looked at after `accept` and after `fill_masks`."""
        if self._failure is not None or not self.matcher.is_error():
            return self._failure
        return f"The grammar cannot go on: {brief(self.matcher.get_error())}"

    def fork(self) -> GrammarState:
        return GrammarState(self.grammar, self.matcher.deep_copy(), self._first_mask)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in threads of its own, and keeps the recent ones.

    `vocab_size` is the number of logits that masks cover; `eos_tokens` are what a grammar that may end allows.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_tokens: Collection[int],
        *,
        threads: int = 2,
        cache_size: int = 64,
    ) -> None:
        self._vocab_size = vocab_size
        self._cache: OrderedDict[Grammar, Future[_Compiled]] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._limits = parser_limits()
        self._filler = MaskFiller(threads)
        self._pool = FairPool(threads, "grammar")
        # Building the tokenizer's trie takes up to a second: it neither delays the start nor the first request.
        self._tokenizer = self._pool.submit("", lambda: _tokenizer(tokenizer_json, vocab_size, sorted(eos_tokens)))

    def compile(self, grammar: Grammar, tenant: str = "") -> Future[GrammarState]:
        """A new state at the grammar's start, ready to give its first mask at once. Fails with `InvalidRequest`.

        Tenants take turns: one with a thousand grammars does not keep the rest waiting.
        """
        return self._pool.submit(tenant, lambda: self._start(grammar))

    def fill_masks(self, states: Sequence[GrammarState | None]) -> torch.Tensor:
        """What each row may draw next, as int32 bits on the host; all of it for rows without a grammar.

        Runs in Rust threads without the GIL. A state that fails gets no token, and has `error` set.
        """
        masks = allocate_token_bitmask(len(states), self._vocab_size)
        todo = []
        for i, state in enumerate(states):
            if state is None:
                continue
            if state._first_mask is not None:
                masks[i] = state._first_mask
            else:
                todo.append((state, i))
        self._filler.fill(todo, masks)
        return torch.from_numpy(masks)

    def close(self) -> None:
        self._pool.close()
        self._filler.close()

    def _start(self, grammar: Grammar) -> GrammarState:
        with self._lock:
            entry = self._cache.get(grammar)
            mine = entry is None
            if entry is None:
                entry = self._cache[grammar] = Future()
                if len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(grammar)
        if mine:
            try:
                entry.set_result(self._compile(grammar))
            except BaseException as error:  # those who wait for this entry must hear of it, whatever it is
                entry.set_exception(error)
        compiled = entry.result()
        return GrammarState(compiled, compiled.matcher.deep_copy(), compiled.first_mask)

    def _compile(self, grammar: Grammar) -> _Compiled:
        tokenizer, special = self._tokenizer.result()
        matcher = LLMatcher(tokenizer, lower(by_id(grammar, special)), log_level=0, limits=self._limits)
        mask = allocate_token_bitmask(1, self._vocab_size)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise invalid_grammar(matcher.get_error())
        return _Compiled(matcher, mask[0])


def _tokenizer(tokenizer_json: str, vocab_size: int, eos_tokens: list[int]) -> tuple[LLTokenizer, dict[str, int]]:
    """And the ids of its special tokens, which a grammar may name."""
    hidden, special = hide_special(tokenizer_json)
    return LLTokenizer(hidden, n_vocab=vocab_size, eos_token=eos_tokens), special
