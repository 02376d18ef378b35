"""Token masks for a batch within a time budget: every stream of a step waits for them.

llguidance bounds the cost of one mask at tens of milliseconds, but a step may need hundreds. The clock is checked every
few rows, and once the masks of a step have taken too long, rows are timed one by one and the most expensive ones fail.
The CPU time of a thread counts, because the forward pass running in parallel would slow down any row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

STEP_SECONDS = 0.1  # budget for the masks of a step
ROW_SECONDS = 0.01  # limit for a timed row; usual ones take under 1 ms
FREE_SECONDS = 0.003  # a row that takes less does not fail for the total
UNTIMED_ROWS = 16  # rows between two checks of the clock
TIMED_STEPS = 8  # steps with timed rows after one that exceeded the budget

TOO_COMPLEX = "The grammar is too complex: computing what may come next takes too long."


class MaskRequest(Protocol):
    """A sequence whose next token mask is needed."""

    @property
    def matcher(self) -> LLMatcher: ...

    @property
    def grammar(self) -> object:
        """The grammar, the same object for all sequences that share it."""

    def fail(self, reason: str) -> None: ...


class MaskFiller:
    """Compute token masks in threads, and fail the rows that exceed the time budget."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor = LLExecutor(num_threads=threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="timed-masks")
        self._timed_steps = 0

    def fill(self, rows: Sequence[tuple[MaskRequest, int]], masks: np.ndarray) -> None:
        """Fill the mask at each row's index. A row that fails, by its grammar or its cost, gets an empty mask."""
        started = time.perf_counter()
        done = 0
        while not self._timed_steps and done < len(rows) and time.perf_counter() - started < STEP_SECONDS:
            self._fill_untimed(rows[done : done + UNTIMED_ROWS], masks)
            done += UNTIMED_ROWS
        if done < len(rows):
            self._fill_timed(rows[done:], masks, started)
        for row, at in rows:
            if row.matcher.is_error():  # llguidance then allows the end tokens, which would look like a regular end
                masks[at] = 0
        slow = time.perf_counter() - started > STEP_SECONDS
        self._timed_steps = TIMED_STEPS if slow else max(0, self._timed_steps - 1)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill_untimed(self, rows: Sequence[tuple[MaskRequest, int]], masks: np.ndarray) -> None:
        if len(rows) == 1:
            fill_next_token_bitmask(rows[0][0].matcher, masks, rows[0][1])
        else:
            fill_next_token_bitmask_par(self._executor, [(row.matcher, at) for row, at in rows], masks)

    def _fill_timed(self, rows: Sequence[tuple[MaskRequest, int]], masks: np.ndarray, started: float) -> None:
        expensive: set[int] = set()  # grammars, by object id

        def cost(request: tuple[MaskRequest, int]) -> float:
            row, at = request
            # The budget is spent, and other rows with this grammar were too expensive: do not try this one.
            if id(row.grammar) in expensive and time.perf_counter() - started > STEP_SECONDS:
                return float("inf")
            begun = time.thread_time()
            fill_next_token_bitmask(row.matcher, masks, at)
            taken = time.thread_time() - begun
            if taken > ROW_SECONDS:
                expensive.add(id(row.grammar))
            return taken

        costs = list(self._pool.map(cost, rows))
        for which in too_expensive(costs, STEP_SECONDS * self._threads):
            row, at = rows[which]
            row.fail(TOO_COMPLEX)
            masks[at] = 0


def too_expensive(costs: Sequence[float], budget: float) -> list[int]:
    """Return the indices of rows above `ROW_SECONDS`, then of the most expensive ones until the rest fit the budget."""
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
