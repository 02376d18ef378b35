"""`/status`: how each model did lately, for anybody who asks.

Anybody may ask as often as they like, so asking must cost next to nothing: the sums of a window are kept for a while,
longer for a longer window, and are read by one query at a time. What a database that is away cannot say is told from
what was last known, marked as stale; nobody waits long for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from syringa.errors import InvalidRequest, StoreError
from syringa.store.records import ModelUsage

logger = logging.getLogger("syringa.service")

DEFAULT_WINDOW = "5m"
PATIENCE = 2.0  # seconds that somebody who asks is made to wait for the database
RETRY_SECONDS = 5.0  # at most, after it did not answer
AT_ONCE = 2  # queries of different windows; there must be readers left for requests

Read = Callable[[float], Awaitable[Sequence[ModelUsage]]]
"""How each model did that was asked since then."""

Models = Callable[[], Sequence[tuple[str, str]]]
"""The id and the name of every configured model."""


class Window(NamedTuple):
    seconds: int
    keep: float  # seconds for which its sums are new enough


WINDOWS: Mapping[str, Window] = {
    "5m": Window(300, 1.0),
    "1h": Window(3600, 5.0),
    "24h": Window(86_400, 20.0),
    "30d": Window(2_592_000, 60.0),
}


class _Sums:
    """What is known of one window."""

    __slots__ = ("by_model", "failed", "next_at", "read_at", "reading", "slow", "tried_at")

    def __init__(self) -> None:
        self.by_model: dict[str, ModelUsage] = {}
        self.read_at: float | None = None
        self.tried_at = self.next_at = -math.inf
        self.failed = False  # the last query did
        self.slow = False  # the one that runs is
        self.reading: asyncio.Task[None] | None = None

    def due(self, now: float) -> bool:
        """A clock that was set back does not keep them for longer."""
        return self.reading is None and not self.tried_at <= now < self.next_at


class Status:
    def __init__(
        self, read: Read, models: Models, clock: Callable[[], float] = time.time, *, patience: float = PATIENCE
    ) -> None:
        self._read, self._models, self._clock, self._patience = read, models, clock, patience
        self._sums = {name: _Sums() for name in WINDOWS}
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def report(self, window: str | None = None) -> dict[str, Any]:
        """The last five minutes, or another window. Raises `InvalidRequest` for one that there is not."""
        name = DEFAULT_WINDOW if window is None else window
        if name not in WINDOWS:
            raise InvalidRequest(f"window: expected {', '.join(WINDOWS)}, not {name[:40]!r}.", param="window")
        sums = self._sums[name]
        if sums.due(self._clock()):
            sums.reading = asyncio.create_task(self._refresh(sums, WINDOWS[name]))
        if sums.reading is not None and not sums.slow:
            await asyncio.wait({sums.reading}, timeout=self._patience)
            sums.slow = sums.reading is not None  # and whoever comes next does not wait for it again
        read_at = self._clock() if sums.read_at is None else sums.read_at
        return {
            "updated_at": datetime.fromtimestamp(read_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window": name,
            "window_secs": WINDOWS[name].seconds,
            "stale": sums.failed or sums.slow,
            "models": [_figures(id, name, sums.by_model.get(id)) for id, name in self._models()],
        }

    async def _refresh(self, sums: _Sums, window: Window) -> None:
        sums.tried_at = began = self._clock()
        found = None
        try:
            async with self._turn:
                found = await self._read(began - window.seconds)
        except StoreError as error:
            logger.warning("status: %s", error.message)
        except Exception:
            logger.exception("status: the usage of models cannot be read")
        finally:
            sums.failed = found is None
            if found is not None:
                sums.by_model, sums.read_at = {each.model: each for each in found}, began
            sums.next_at = self._clock() + (min(window.keep, RETRY_SECONDS) if found is None else window.keep)
            sums.reading, sums.slow = None, False


def _figures(id: str, name: str, usage: ModelUsage | None) -> dict[str, Any]:
    """One request is enough to say something; a figure for which there was none is null."""
    tps = ttfb = uptime = None
    if usage is not None:
        if usage.later_tokens > 0 and usage.later_seconds > 0:
            tps = round(usage.later_tokens / usage.later_seconds, 2)
        if usage.first_token_seconds is not None:
            ttfb = round(usage.first_token_seconds, 4)
        if ended := usage.ok + usage.failed:
            uptime = math.floor(100_000 * usage.ok / ended) / 1000  # rounded down: 100 means that none failed
    return {"id": id, "name": name, "tps": tps, "ttfb_seconds": ttfb, "uptime_pct": uptime}
