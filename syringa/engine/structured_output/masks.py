"""Masks for a batch, inside a step's time. Every stream waits for them, so no grammar may take it all.

llguidance bounds what one mask costs, at tens of milliseconds; a request has up to 128 rows. So the clock is looked at
every few rows, and once a step's masks have taken too long, rows are timed one by one: the dearest ones fail. What
counts is a thread's own time: the model computes beside it, and would make anybody look slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

STEP_SECONDS = 0.1  # that the masks of a step may take
ROW_SECONDS = 0.01  # that one may take once it is timed; ordinary ones take under 1 ms
FREE_SECONDS = 0.003  # up to this much, no row fails for what all take together
UNTIMED_ROWS = 16  # between two looks at the clock
WATCHED_STEPS = 8  # in which rows are timed, after one that took too long

TOO_COMPLEX = "The grammar is too complex: computing what may come next takes too long."


class Row(Protocol):
    """A sequence's place in its grammar."""

    @property
    def matcher(self) -> LLMatcher: ...

    @property
    def grammar(self) -> object:
        """The same for all that have the same grammar."""

    def fail(self, reason: str) -> None: ...


class MaskFiller:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor = LLExecutor(num_threads=threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="timed-masks")
        self._watched = 0

    def fill(self, rows: Sequence[tuple[Row, int]], masks: np.ndarray) -> None:
        """Fills the mask at each row's index. That of a row that fails, by its grammar or by its cost, is empty."""
        started = time.perf_counter()
        done = 0
        while not self._watched and done < len(rows) and time.perf_counter() - started < STEP_SECONDS:
            self._fill_untimed(rows[done : done + UNTIMED_ROWS], masks)
            done += UNTIMED_ROWS
        if done < len(rows):
            self._fill_timed(rows[done:], masks, started)
        for row, at in rows:
            if row.matcher.is_error():  # llguidance allows the end tokens then, and it would look like an end
                masks[at] = 0
        slow = time.perf_counter() - started > STEP_SECONDS
        self._watched = WATCHED_STEPS if slow else max(0, self._watched - 1)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill_untimed(self, rows: Sequence[tuple[Row, int]], masks: np.ndarray) -> None:
        if len(rows) == 1:
            fill_next_token_bitmask(rows[0][0].matcher, masks, rows[0][1])
        else:
            fill_next_token_bitmask_par(self._executor, [(row.matcher, at) for row, at in rows], masks)

    def _fill_timed(self, rows: Sequence[tuple[Row, int]], masks: np.ndarray, started: float) -> None:
        dear: set[int] = set()

        def cost(each: tuple[Row, int]) -> float:
            row, at = each
            # There is no time left, and others with this grammar were too dear: this one is not even tried.
            if id(row.grammar) in dear and time.perf_counter() - started > STEP_SECONDS:
                return float("inf")
            begun = time.thread_time()
            fill_next_token_bitmask(row.matcher, masks, at)
            taken = time.thread_time() - begun
            if taken > ROW_SECONDS:
                dear.add(id(row.grammar))
            return taken

        costs = list(self._pool.map(cost, rows))
        for which in _too_dear(costs, STEP_SECONDS * self._threads):
            row, at = rows[which]
            row.fail(TOO_COMPLEX)
            masks[at] = 0


def _too_dear(costs: Sequence[float], budget: float) -> list[int]:
    """The rows that each take too long, and then the dearest, until the rest fit the budget."""
    left = sum(cost for cost in costs if cost <= ROW_SECONDS)
    found = []
    for which in sorted(range(len(costs)), key=lambda each: -costs[each]):
        if costs[which] > ROW_SECONDS:
            found.append(which)
        elif left > budget and costs[which] > FREE_SECONDS:
            found.append(which)
            left -= costs[which]
        else:
            break
    return found
