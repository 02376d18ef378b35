"""The shared state of an API server process: store, API keys, limits, usage accounting and background responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from syringa.config import Config, Prices
from syringa.errors import StoreError
from syringa.service.auth.key_cache import ApiKeyCache
from syringa.service.auth.key_watch import KeyWatch
from syringa.service.auth.keys import Caller, RateLimits
from syringa.service.batches.run import LINE_BYTES, BatchServices, ExecuteLine
from syringa.service.batches.runner import BatchRunner
from syringa.service.files.manager import FileManager
from syringa.service.files.storage import FileStorage, files_folder
from syringa.service.limits.memory_budget import MemoryBudget
from syringa.service.limits.rate_limiter import RateLimiter
from syringa.service.mcp.client import McpClient
from syringa.service.metrics.metrics import Metrics
from syringa.service.model_catalog import ModelCatalog
from syringa.service.responses.background import BackgroundResponses
from syringa.service.responses.history import HistoryLimits, HistoryReader
from syringa.service.responses.manager import ResponseManager
from syringa.service.responses.remembered import RememberedHistories
from syringa.service.series.recorder import SeriesRecorder
from syringa.service.store_poller import StorePoller, StoreRevisions
from syringa.service.usage.accounting import Observer, RequestAccounting, usage_record
from syringa.service.usage.journal import UsageJournal, journal_folder
from syringa.service.usage.writer import UsageWriter
from syringa.store import Store, UsageRecord

EXPIRE_SECONDS = 3600.0


class AppState:
    """Everything that handlers and middleware share. `start` it before serving, `close` it afterwards.

    Before `start`, only the keys of the configuration are known and no usage is written.
    """

    def __init__(
        self,
        config: Config,
        *,
        store: Store | None = None,
        catalog: ModelCatalog | None = None,
        prices: Callable[[str], Prices] = lambda model: Prices(),
        limits_file: str | None = None,
        metrics_folder: str | None = None,
        index: int = 0,
    ) -> None:
        """Raises `StartupError` for invalid settings.

        `store`: by default, the one of the configuration. `catalog`: None if models cannot be added at run time.
        `prices`: of a model, by its id. `limits_file` and `metrics_folder` are shared by the API processes of a server,
        of which this one is number `index`; None if it is the only one.
        """
        self.store = Store(config.database) if store is None else store
        self.responses = ResponseManager(self.store, config.response_days)
        self.history = HistoryReader(self.responses, HistoryLimits(config.history_max_items, config.history_max_bytes))
        self.remembered = RememberedHistories(4 * config.history_max_bytes)
        self.background = BackgroundResponses(config.max_background)
        self.mcp = McpClient(config.mcp_hosts, timeout=config.mcp_timeout, max_bytes=config.mcp_max_bytes)
        self.draining = False
        self.drain_callbacks: set[Callable[[], None]] = set()  # called when draining begins
        limits = RateLimits(
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrent=config.concurrent_requests,
        )
        self.keys = ApiKeyCache(self.store, config.api_key, limits, assume_empty=True)
        self.key_watch = KeyWatch(self.keys.check)
        self.limiter = RateLimiter(limits_file, index=index)
        self.metrics = Metrics(
            config.metrics_prefix, metrics_folder, index=index, before_render=self._observe_finished_requests
        )
        # The engines are sampled by one process of a server; in a cluster, all servers have the same ones.
        engines = "cluster" if config.cluster else f"{self.responses.process}/engines"
        self.series = SeriesRecorder(self.store, self.responses.process, engines if index == 0 else None)
        self.catalog = catalog
        self.files = FileManager(
            self.store,
            FileStorage(files_folder(self.store.location, config.files_dir)),
            quota=config.files_quota_bytes,
            days=config.file_days,
        )
        self.batches = BatchRunner(self._batch_services)
        self.execute_line: ExecuteLine | None = None  # set by the app, whose handlers run the lines of batches
        self._config = config
        caches = [self._refresh_keys, *([] if catalog is None else [catalog.refresh]), self.batches.refresh]
        self._poller = StorePoller(self.store, *caches)
        self.usage_writer = UsageWriter(
            lambda records: self.store.write(lambda session: session.usage.add(records)),
            UsageJournal(journal_folder(self.store.location)),
            before_flush=self._observe_finished_requests,
        )
        self.observers: list[Observer] = [self._charge_tokens, self._finish_request]
        self._prices = prices
        self._finished: list[RequestAccounting] = []  # to be observed by the metrics
        self._usage_days = config.usage_days
        self._started = False
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load keys and models from the store, and write usage from now on.

        Raises `StartupError` for a database of a newer Syringa.
        """
        await self.keys.start()
        self.usage_writer.recover()
        self._started = True
        if self.catalog is not None:
            await self.catalog.start()
        self._poller.start()
        self.series.start()
        if self.files.any_stored:
            self.files.start()
        if self._usage_days:
            self._expiry = asyncio.create_task(self._expire_usage())

    async def drain(self, seconds: float) -> None:
        """Give background responses some time to finish; those that do not are marked as failed.

        Batches stop at once: another process, or this server when it is started again, goes on with them.
        """
        await asyncio.gather(self.background.drain(seconds), self.batches.close())

    async def close(self) -> None:
        await self.drain(0)
        await self.files.close()
        await self.mcp.close()
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        if self._started:
            await self.usage_writer.close()
            await self.series.close()
        await self._poller.close()
        await self.keys.close()
        self.limiter.close()
        await self.responses.close()
        await self.store.close()

    async def refresh_keys(self) -> None:
        """Apply a change of keys or organizations in this process at once."""
        if self._started:
            await self._refresh_keys(StoreRevisions(self.store))

    async def _refresh_keys(self, revisions: StoreRevisions) -> None:
        await self.keys.refresh(revisions)
        self.key_watch.cancel_invalid()

    def start_accounting(self, caller: Caller, endpoint: str, request_id: str) -> RequestAccounting:
        """Begin the accounting of a request, whose end is reported to `observers`."""
        return RequestAccounting(self.observers, caller, endpoint, request_id)

    def _charge_tokens(self, accounting: RequestAccounting) -> None:
        stats = accounting.stats
        self.limiter.charge(accounting.caller, stats.prompt_tokens + stats.completion_tokens)

    def _finish_request(self, accounting: RequestAccounting) -> None:
        """Write the usage record, at the model's current price, and queue the request for the metrics.

        Several at once are cheaper to observe.
        """
        self._finished.append(accounting)
        if self._started:
            self.usage_writer.add(usage_record(accounting, self._prices(accounting.model)))
        else:
            self._observe_finished_requests()

    def _batch_services(self) -> BatchServices | None:
        config = self._config
        if self.execute_line is None or not self._started:
            return None
        return BatchServices(
            store=self.store,
            files=self.files,
            execute=self.execute_line,
            find_caller=self.keys.find,
            usage_of=self._finish_line,
            slots=MemoryBudget(config.batch_concurrency),
            memory=MemoryBudget(max(LINE_BYTES, config.max_body_bytes)),
            owner=self.responses.process,
            max_line=config.max_body_bytes,
            max_lines=config.batch_max_lines,
            queue_lines=config.batch_queue_lines,
            days=config.file_days,
        )

    def _finish_line(self, accounting: RequestAccounting, id: str) -> UsageRecord:
        """Return the usage record of a line of a batch, at the price of batches, and count it in the metrics.

        Lines wait for other requests, so their latencies say nothing about the speed of a model.
        """
        accounting.first_token_seconds = None
        self.metrics.observe(accounting)
        self.series.observe(accounting)
        self.metrics.count_line(failed=accounting.outcome != "ok")
        record = usage_record(accounting, self._prices(accounting.model))
        return msgspec.structs.replace(record, id=id, cost=record.cost * (1 - self._config.batch_discount))

    def _observe_finished_requests(self) -> None:
        finished, self._finished = self._finished, []
        for accounting in finished:
            self.metrics.observe(accounting)
            self.series.observe(accounting)

    def count_refused(self, endpoint: str, status: int) -> None:
        """Count a request that was rejected before its accounting began, because its API key is unknown."""
        self.metrics.count_refused(endpoint, status)
        self.series.count_refused(status)

    async def _expire_usage(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            with contextlib.suppress(StoreError):
                await self.store.expire_usage(time.time() - self._usage_days * 86400)
