"""`/status`: recent statistics of each model, without authentication.

Any client may ask at any rate, so a report must be cheap: statistics of a window are cached, longer for a longer
window, and read by one query at a time. While the database is unavailable, the last values are reported as stale.
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
MAX_WAIT_SECONDS = 2.0  # for the database, per request
RETRY_SECONDS = 5.0  # at most, after a failed query
MAX_QUERIES = 2  # at the same time, so that readers are left for other requests

ReadUsage = Callable[[float], Awaitable[Sequence[ModelUsage]]]
"""Returns the usage of each model since a time."""

ModelNames = Callable[[], Sequence[tuple[str, str]]]
"""Returns the id and the name of every configured model."""


class StatusWindow(NamedTuple):
    seconds: int
    keep: float  # seconds for which its statistics are cached


WINDOWS: Mapping[str, StatusWindow] = {
    "5m": StatusWindow(300, 1.0),
    "1h": StatusWindow(3600, 5.0),
    "24h": StatusWindow(86_400, 20.0),
    "30d": StatusWindow(2_592_000, 60.0),
}


class _WindowCache:
    """The cached statistics of one window."""

    __slots__ = ("by_model", "failed", "next_at", "read_at", "reading", "slow", "tried_at")

    def __init__(self) -> None:
        self.by_model: dict[str, ModelUsage] = {}
        self.read_at: float | None = None
        self.tried_at = self.next_at = -math.inf
        self.failed = False  # whether the last query failed
        self.slow = False  # whether the running query exceeded the wait
        self.reading: asyncio.Task[None] | None = None

    def is_due(self, now: float) -> bool:
        """Return whether to read again; also if the clock was set back."""
        return self.reading is None and not self.tried_at <= now < self.next_at


class ModelStatus:
    """Reports speed, latency and availability of each model."""

    def __init__(
        self,
        read_usage: ReadUsage,
        models: ModelNames,
        clock: Callable[[], float] = time.time,
        *,
        max_wait: float = MAX_WAIT_SECONDS,
        is_ready: Callable[[str], bool] = lambda model: True,
        replicas: Callable[[str], Mapping[str, int]] = lambda model: {},
        fleet: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
    ) -> None:
        """`is_ready` tells of a model's id whether it can answer requests now, `replicas` their number by status.

        `fleet`: what is said of nodes, pools and moves, see `summarize_fleet` and `Metrics.summarize_replicas`.
        """
        self._is_ready, self._replicas, self._fleet = is_ready, replicas, fleet
        self._read_usage, self._models, self._clock, self._max_wait = read_usage, models, clock, max_wait
        self._caches = {name: _WindowCache() for name in WINDOWS}
        self._queries = asyncio.Semaphore(MAX_QUERIES)

    async def report(self, window: str | None = None) -> dict[str, Any]:
        """Return the statistics of a window, by default the last five minutes. Raises `InvalidRequest`."""
        name = DEFAULT_WINDOW if window is None else window
        if name not in WINDOWS:
            raise InvalidRequest(f"window: expected {', '.join(WINDOWS)}, not {name[:40]!r}.", param="window")
        cache = self._caches[name]
        if cache.is_due(self._clock()):
            cache.reading = asyncio.create_task(self._refresh(cache, WINDOWS[name]))
        if cache.reading is not None and not cache.slow:
            await asyncio.wait({cache.reading}, timeout=self._max_wait)
            cache.slow = cache.reading is not None  # later requests do not wait for it again
        read_at = self._clock() if cache.read_at is None else cache.read_at
        return {
            "updated_at": datetime.fromtimestamp(read_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window": name,
            "window_secs": WINDOWS[name].seconds,
            "stale": cache.failed or cache.slow,
            "models": [
                {
                    **_statistics(id, name, cache.by_model.get(id)),
                    "ready": self._is_ready(id),
                    "replicas": dict(self._replicas(id)),
                }
                for id, name in self._models()
            ],
            **self._fleet(),
        }

    async def _refresh(self, cache: _WindowCache, window: StatusWindow) -> None:
        cache.tried_at = began = self._clock()
        found = None
        try:
            async with self._queries:
                found = await self._read_usage(began - window.seconds)
        except StoreError as error:
            logger.warning("status: usage cannot be read: %s", error.message)
        except Exception:
            logger.exception("status: usage cannot be read")
        finally:
            cache.failed = found is None
            if found is not None:
                cache.by_model, cache.read_at = {each.model: each for each in found}, began
            cache.next_at = self._clock() + (min(window.keep, RETRY_SECONDS) if found is None else window.keep)
            cache.reading, cache.slow = None, False


def _statistics(id: str, name: str, usage: ModelUsage | None) -> dict[str, Any]:
    """Return the statistics of one model. A value without any request to compute it from is null."""
    tps = ttfb = uptime = None
    if usage is not None:
        if usage.decode_tokens > 0 and usage.decode_seconds > 0:
            tps = round(usage.decode_tokens / usage.decode_seconds, 2)
        if usage.first_token_seconds is not None:
            ttfb = round(usage.first_token_seconds, 4)
        if ended := usage.ok + usage.failed:
            uptime = math.floor(100_000 * usage.ok / ended) / 1000  # rounded down: 100 means that none failed
    return {"id": id, "name": name, "tps": tps, "ttfb_seconds": ttfb, "uptime_pct": uptime}
