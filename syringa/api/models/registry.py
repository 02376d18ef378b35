"""The models that a server answers for: those of the settings, and those that were added while it runs.

Names and descriptions are known of all; tokenizer and template are read when the first request for a model comes. What
is wrong with one model is told to whoever asks for it, and to nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from syringa.api.models.loading import describe_model, load_model, serving_specs
from syringa.api.models.served_model import ModelCard, Models, ServedModel, Status, forbidden_model, unknown_model
from syringa.config import Config, ModelSpec, Prices, filled_spec
from syringa.errors import ConfigError, EngineUnavailable, StartupError, SyringaError

logger = logging.getLogger("syringa.api")

REMEMBERED_SECONDS = 5.0  # a model that could not be read is not read again for every request


class Registry:
    """Raises `StartupError` for settings from which no list of models can be made. Call `start` before anything."""

    def __init__(
        self,
        config: Config,
        *,
        status: Callable[[str], Status] = lambda model: "loaded",
        changed: Callable[[Sequence[ModelSpec]], None] = lambda specs: None,
    ) -> None:
        """`status` says whether a model is in memory; `changed` is told of the models, at once and when they change."""
        self._config, self._status, self._changed = config, status, changed
        self._configured = serving_specs(config)
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}
        self.replace(())

    @property
    def default(self) -> str:
        return self._configured[0].id

    @property
    def ids(self) -> Sequence[str]:
        return list(self._entries)

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """Every model as it is configured; the first is the default one."""
        return tuple(entry.spec for entry in self._entries.values())

    async def start(self) -> None:
        """Reads the default model. Raises `StartupError` if it cannot be read."""
        await self._entries[self.default].read()

    def replace(self, added: Iterable[ModelSpec]) -> None:
        """These, beside those of the settings, are the models from now on. One that has changed is read again. A name
        that two have is that of the first, and the settings come first: they are not overruled."""
        own = {spec.id for spec in self._configured}
        specs = [*self._configured]
        for spec in added:
            if spec.id in own:
                logger.warning("model %s is in the settings too: what was added later does not count", spec.id)
            else:
                specs.append(filled_spec(spec, self._config))
        before = self._entries
        self._entries = {}
        self._names = {}
        for spec in specs:
            kept = before.get(spec.id)
            self._entries[spec.id] = kept if kept is not None and kept.spec == spec else _Entry(spec, self._config)
        for entry in self._entries.values():
            self._names.setdefault(entry.spec.id, entry.spec.id)
        for entry in self._entries.values():
            for name in entry.spec.aliases:
                self._names.setdefault(name, entry.spec.id)
        self._names.setdefault("default", self.default)
        self._changed(self.specs)

    def check(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` for a model to be added whose names are taken."""
        if spec.id in {each.id for each in self._configured}:
            raise ConfigError(f"The model {spec.id!r} is in the settings, and is changed there.", param="id")
        for index, name in enumerate((spec.id, *spec.aliases)):
            owner = self._names.get(name, spec.id)
            if owner != spec.id:
                param = f"aliases[{index - 1}]" if index else "id"
                raise ConfigError(f"The model {owner!r} has the name {name!r} already.", param=param)

    def learn(self, model: str, max_model_len: int) -> None:
        """A worker knows how long a sequence its cache can hold; the files only what the model was made for."""
        if entry := self._entries.get(model):
            entry.learn(max_model_len)

    def prices(self, model: str) -> Prices:
        """What a model's tokens cost: nothing, where nothing is said."""
        entry = self._entries.get(model)
        return (entry.spec.prices if entry else None) or Prices()

    async def find(self, name: str | None) -> ServedModel:
        return await self._find(name, None).served()

    async def all(self) -> list[ModelCard]:
        return await self._all(None)

    async def show(self, name: str) -> ModelCard:
        return await self._card(self._find(name, None))

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else _ForKey(self, allowed)

    def _find(self, name: str | None, allowed: frozenset[str] | None) -> _Entry:
        try:
            entry = self._entries[self.default if name is None else self._names[name]]
        except KeyError:
            ids = [id for id in self._entries if allowed is None or id in allowed]
            raise unknown_model(name, ids) from None
        if allowed is not None and entry.spec.id not in allowed:
            raise forbidden_model(entry.spec.id)
        return entry

    async def _all(self, allowed: frozenset[str] | None) -> list[ModelCard]:
        entries = [entry for id, entry in self._entries.items() if allowed is None or id in allowed]
        return list(await asyncio.gather(*(self._card(entry) for entry in entries)))

    async def _card(self, entry: _Entry) -> ModelCard:
        status = self._status(entry.spec.id)
        return await entry.card("failed" if entry.failed and status == "cold" else status)


class _ForKey:
    """The models that one key may use."""

    def __init__(self, registry: Registry, allowed: frozenset[str]) -> None:
        self._registry, self._allowed = registry, allowed

    @property
    def default(self) -> str:
        return self._registry.default

    @property
    def ids(self) -> Sequence[str]:
        return [id for id in self._registry.ids if id in self._allowed]

    async def find(self, name: str | None) -> ServedModel:
        return await self._registry._find(name, self._allowed).served()

    async def all(self) -> list[ModelCard]:
        return await self._registry._all(self._allowed)

    async def show(self, name: str) -> ModelCard:
        return await self._registry._card(self._registry._find(name, self._allowed))

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else _ForKey(self._registry, self._allowed & allowed)


class _Entry:
    """One model, as far as it was read."""

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self.spec, self._config = spec, config
        self._created = int(time.time())
        self._model: ServedModel | None = None
        self._card: ModelCard | None = None
        self._reading: asyncio.Task[ServedModel] | None = None
        self._error = ""
        self._error_until = 0.0
        self._limit: int | None = None  # what a worker has said
        self._made_for = 0  # what the files say

    @property
    def failed(self) -> bool:
        return bool(self._error) and time.monotonic() < self._error_until

    async def served(self) -> ServedModel:
        """The model, read if it was not. Raises `EngineUnavailable` where it cannot be."""
        if self._model is not None:
            return self._model
        if self.failed:
            raise self._unavailable()
        try:
            return await self.read()
        except Exception as error:
            if not isinstance(error, SyringaError):
                logger.exception("model %s cannot be read", self.spec.id)
            self._error = error.message if isinstance(error, SyringaError) else "An internal error occurred."
            self._error_until = time.monotonic() + REMEMBERED_SECONDS
            raise self._unavailable() from None

    async def read(self) -> ServedModel:
        """Raises `StartupError`. Whoever comes while it is being read waits for the same; who leaves stops nobody."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(load_model, self._config, self.spec))
            self._reading.add_done_callback(self._done)
        return await asyncio.shield(self._reading)

    def _done(self, reading: asyncio.Task[ServedModel]) -> None:
        self._reading = None
        if reading.cancelled() or reading.exception() is not None:
            return
        self._model, self._error = reading.result(), ""
        self._made_for = self._model.max_model_len
        if self._limit is not None:
            self.learn(self._limit)

    async def card(self, status: Status) -> ModelCard:
        if self._model is not None:
            return self._model.card(status)
        if self._card is None:
            try:
                self._card = await asyncio.to_thread(describe_model, self.spec, self._created)
            except StartupError:
                spec = self.spec
                return ModelCard(
                    id=spec.id, aliases=spec.aliases, created=self._created, prices=spec.prices, status="failed"
                )
        return msgspec.structs.replace(self._card, status=status)

    def learn(self, max_model_len: int) -> None:
        self._limit = max_model_len
        if self._model is not None:
            self._model.max_model_len = min(self._made_for, max_model_len)

    def _unavailable(self) -> EngineUnavailable:
        said = f"The model {self.spec.id!r} cannot be used: {self._error}"
        return EngineUnavailable(said, code="model_unavailable")
