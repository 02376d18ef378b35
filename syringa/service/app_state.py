"""What goes on beside the requests, to be begun and ended in order with the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from syringa.config import Config
from syringa.errors import StoreError
from syringa.service.auth.caller import Rates
from syringa.service.auth.key_cache import Keyring
from syringa.service.limits.rate_limiter import Limiter
from syringa.service.metrics.metrics import Metrics
from syringa.service.model_catalog import Catalogue
from syringa.service.responses.background import Background
from syringa.service.responses.state import State
from syringa.service.usage.account import Account, Books
from syringa.service.usage.meter import Meter
from syringa.service.usage.pricing import Prices, cost
from syringa.store.records import UsageRow

EXPIRE_SECONDS = 3600.0


class Work:
    """Raises `StartupError` for settings that cannot be. Until `start`, there are no keys but those of the settings,
    and nothing is written of requests: that is how parts of a server are tested."""

    def __init__(
        self, config: Config, *, limits: str | None = None, metrics: str | None = None, index: int = 0
    ) -> None:
        """`limits` and `metrics`: the file and the folder that the API processes of a server share, of which this one
        is number `index`; None: it is the only one."""
        self.state = State(config)
        self.background = Background(config.max_background)
        self.draining = False
        self.leaving: set[Callable[[], None]] = set()  # called when it begins to drain
        rates = Rates(
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrent=config.concurrent_requests,
        )
        self.keys = Keyring(self.state.database, config.api_key, rates)
        self.keys.begin_empty()
        self.limiter = Limiter(limits, index=index)
        self.books = Books()
        self.books.observers.append(self._charge)
        self.metrics = Metrics(config.metrics_prefix, metrics, index=index)
        self.metrics.settle = self._settle
        self.books.observers.append(self._end)
        self._ended: list[tuple[Account, Prices]] = []
        self.catalogue: Catalogue | None = None  # None: the models are those of the settings
        self.meter: Meter | None = None
        self.price: Callable[[str], Prices] = lambda model: Prices()  # of a model, by its id
        self._usage_days = config.usage_days
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the keys that are stored, and writes down what requests use from now on. Raises `StartupError` for a
        store that a newer Syringa has changed."""
        await self.keys.start()
        self.meter = Meter(self.state.database.usage.add, settle=self._settle)
        if self.catalogue is not None:
            await self.catalogue.look()
            self.keys.also.append(self.catalogue.look)
        if self._usage_days:
            self._expiring = asyncio.create_task(self._expire())

    async def drain(self, seconds: float) -> None:
        """What runs gets some time to end by itself; what does not is marked as failed."""
        await self.background.drain(seconds)

    async def close(self) -> None:
        await self.background.drain(0)
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
        if self.meter is not None:
            await self.meter.close()
        await self.keys.close()
        self.limiter.close()
        await self.state.close()

    def _end(self, account: Account) -> None:
        """Counting can wait, and it is cheaper for several at once; the prices are those of now."""
        self._ended.append((account, self.price(account.model)))
        if self.meter is not None:
            self.meter.expect()
        else:
            self._settle()

    def _settle(self) -> None:
        ended, self._ended = self._ended, []
        for account, prices in ended:
            self.metrics(account)
            if self.meter is not None:
                self._note(account, prices, self.meter)

    def _note(self, account: Account, prices: Prices, meter: Meter) -> None:
        used = account.trace
        meter.note(
            UsageRow(
                at=account.began,
                organisation=account.caller.organisation,
                key=account.caller.key,
                model=account.model,
                endpoint=account.endpoint,
                user=account.user,
                request_id=account.request_id,
                outcome=account.outcome,
                status=account.status,
                input_tokens=used.prompt_tokens,
                cached_tokens=used.cached_tokens,
                output_tokens=used.completion_tokens,
                reasoning_tokens=used.reasoning_tokens,
                queue_seconds=used.queued,
                load_seconds=account.load_seconds,
                first_token_seconds=account.first_token_seconds,
                total_seconds=account.total_seconds,
                cost=cost(prices, used.prompt_tokens, used.cached_tokens, used.completion_tokens),
            )
        )

    async def _expire(self) -> None:
        """What was used long ago is forgotten."""
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            with contextlib.suppress(StoreError):
                await self.state.database.usage.expire(time.time() - self._usage_days * 86400)

    def _charge(self, account: Account) -> None:
        used = account.trace
        self.limiter.charge(account.caller, used.prompt_tokens + used.completion_tokens)
