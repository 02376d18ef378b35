"""The models of a server: those of the settings, and those that were added at run time.

A model's tokenizer and template are read on its first request. A model that cannot be read fails its own requests only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from syringa.api.models.loading import describe_model, load_model
from syringa.api.models.served_model import (
    DEFAULT_NAMES,
    GENERATING,
    GrammarCheck,
    ModelCard,
    Models,
    ModelStatus,
    ServedModel,
    check_kind,
    find_by_name,
    first_of_kinds,
    forbidden_model,
    unknown_model,
)
from syringa.api.models.specs import serving_specs
from syringa.config import Config, ModelSpec, Prices, complete_spec
from syringa.errors import ConfigError, EngineUnavailable, StartupError, SyringaError
from syringa.types import ModelKind, ModelLoading

logger = logging.getLogger("syringa.api")

FAILURE_TTL = 5.0  # seconds before a model that could not be read is tried again


class ModelRegistry:
    """All models of a server, by id and alias. `start` has to be called first."""

    def __init__(
        self,
        config: Config,
        *,
        status: Callable[[str], ModelStatus] = lambda model: "loaded",
        loading: Callable[[str], ModelLoading | None] = lambda model: None,
        on_change: Callable[[Sequence[ModelSpec]], None] = lambda specs: None,
        check_grammar: Callable[[str], GrammarCheck] | None = None,
    ) -> None:
        """`status` returns the status of a model, and `loading` how far it is in being loaded.

        `on_change` is called with all specs, now and after every change.

        `check_grammar` returns the function that checks the grammars of a model; the default checks in this process.

        Raises `StartupError` for invalid settings.
        """
        self._config, self._status, self._loading, self._on_change = config, status, loading, on_change
        self._check_grammar = check_grammar
        self._configured = serving_specs(config)
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}
        self.set_added(())

    @property
    def default(self) -> str:
        return self._configured[0].id

    @property
    def ids(self) -> Sequence[str]:
        return list(self._entries)

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """Specs of all models; the first is the default."""
        return tuple(entry.spec for entry in self._entries.values())

    async def start(self) -> None:
        """Read the default model. Raises `StartupError`."""
        await self._entries[self.default].read()

    def set_added(self, added: Iterable[ModelSpec]) -> None:
        """Set the models beside those of the settings. A model whose spec has changed is read again.

        A name that several models have belongs to the first; models of the settings come first.
        """
        own = {spec.id for spec in self._configured}
        specs = [*self._configured]
        for spec in added:
            if spec.id in own:
                logger.warning("added model ignored, its id is in the settings: model=%s", spec.id)
            else:
                specs.append(complete_spec(spec, self._config))
        previous = self._entries
        self._entries = {}
        self._names = {}
        for spec in specs:
            kept = previous.get(spec.id)
            self._entries[spec.id] = kept if kept is not None and kept.spec == spec else _Entry(spec, self._config)
        for entry in self._entries.values():
            self._names.setdefault(entry.spec.id, entry.spec.id)
        for entry in self._entries.values():
            for name in entry.spec.aliases:
                self._names.setdefault(name, entry.spec.id)
        self._names.setdefault("default", self.default)
        self._on_change(self.specs)

    def is_configured(self, id: str) -> bool:
        """Whether a model is defined in the settings, and was not added at run time."""
        return any(spec.id == id for spec in self._configured)

    def check_names(self, spec: ModelSpec) -> None:
        """Raise `ConfigError` if a name of a model to be added is taken."""
        if spec.id in {each.id for each in self._configured}:
            raise ConfigError(
                f"The model {spec.id!r} is defined in the settings and can only be changed there.", param="id"
            )
        for index, name in enumerate((spec.id, *spec.aliases)):
            owner = self._names.get(name, spec.id)
            if owner != spec.id:
                param = f"aliases[{index - 1}]" if index else "id"
                raise ConfigError(f"The name {name!r} is already used by the model {owner!r}.", param=param)

    def set_max_model_len(self, model: str, max_model_len: int) -> None:
        """Set the longest sequence that the worker's cache can hold, which may be less than the files allow."""
        if entry := self._entries.get(model):
            entry.set_max_model_len(max_model_len)

    def failure(self, model: str) -> str:
        """Return why a model could not be read; "" if it could. For the operator: it may name files of the server."""
        entry = self._entries.get(model)
        return entry.failure if entry else ""

    def prices(self, model: str) -> Prices:
        """Return the prices of a model; zero if none are set."""
        entry = self._entries.get(model)
        return (entry.spec.prices if entry else None) or Prices()

    async def find(
        self, name: str | None, kinds: Sequence[ModelKind] = GENERATING, *, allowed: frozenset[str] | None = None
    ) -> ServedModel:
        if "generate" not in kinds and name in DEFAULT_NAMES:
            cards = await self.all(allowed=allowed)
            wanted = self._config.embedding_model
            cards.sort(key=lambda card: wanted not in (card.id, *card.aliases))  # that of the setting comes first
            name = first_of_kinds(cards, kinds)
        entry = self._find(name, allowed)
        model = await entry.get()
        check_kind(model, kinds)
        if self._check_grammar is not None:
            model.check_grammar = self._check_grammar(entry.spec.id)
        return model

    async def all(self, *, allowed: frozenset[str] | None = None) -> list[ModelCard]:
        entries = [entry for id, entry in self._entries.items() if allowed is None or id in allowed]
        return list(await asyncio.gather(*(self._card(entry) for entry in entries)))

    async def show(self, name: str, *, allowed: frozenset[str] | None = None) -> ModelCard:
        return await self._card(self._find(name, allowed))

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else _KeyModels(self, allowed)

    def _find(self, name: str | None, allowed: frozenset[str] | None) -> _Entry:
        try:
            entry = self._entries[find_by_name(self._names, name) if name else self.default]
        except KeyError:
            ids = [id for id in self._entries if allowed is None or id in allowed]
            raise unknown_model(name, ids) from None
        if allowed is not None and entry.spec.id not in allowed:
            raise forbidden_model(entry.spec.id)
        return entry

    async def _card(self, entry: _Entry) -> ModelCard:
        status = self._status(entry.spec.id)
        card = await entry.card("failed" if entry.failed and status == "cold" else status)
        loading = self._loading(entry.spec.id) if card.status == "loading" else None
        return card if loading is None else msgspec.structs.replace(card, loading=loading)


class _KeyModels:
    """The models that one API key may use."""

    def __init__(self, registry: ModelRegistry, allowed: frozenset[str]) -> None:
        self._registry, self._allowed = registry, allowed

    @property
    def default(self) -> str:
        return self._registry.default

    @property
    def ids(self) -> Sequence[str]:
        return [id for id in self._registry.ids if id in self._allowed]

    async def find(self, name: str | None, kinds: Sequence[ModelKind] = GENERATING) -> ServedModel:
        return await self._registry.find(name, kinds, allowed=self._allowed)

    async def all(self) -> list[ModelCard]:
        return await self._registry.all(allowed=self._allowed)

    async def show(self, name: str) -> ModelCard:
        return await self._registry.show(name, allowed=self._allowed)

    def for_key(self, allowed: frozenset[str] | None) -> Models:
        return self if allowed is None else _KeyModels(self._registry, self._allowed & allowed)


class _Entry:
    """One model, and its files once they were read."""

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self.spec, self._config = spec, config
        self._read_error = self._describe_error = ""  # of the last try
        self._created = int(time.time())
        self._model: ServedModel | None = None
        self._card: ModelCard | None = None
        self._reading: asyncio.Task[ServedModel] | None = None
        self._failed_until = 0.0
        self._worker_limit: int | None = None  # max_model_len of the worker's cache
        self._file_limit = 0  # max_model_len of the files

    @property
    def failed(self) -> bool:
        return time.monotonic() < self._failed_until

    @property
    def failure(self) -> str:
        return self._read_error or self._describe_error

    async def get(self) -> ServedModel:
        """Return the model, and read it first if necessary. Raises `EngineUnavailable` if it cannot be read."""
        if self._model is not None:
            return self._model
        if self.failed:
            raise self._unavailable()
        try:
            return await self.read()
        except Exception as error:
            if isinstance(error, SyringaError):
                self._read_error = error.message
                logger.error("model cannot be read: model=%s error=%r", self.spec.id, error.message)
            else:
                self._read_error = f"{type(error).__name__}: the log of the server has more."
                logger.exception("model cannot be read: model=%s", self.spec.id)
            self._failed_until = time.monotonic() + FAILURE_TTL
            raise self._unavailable() from None

    async def read(self) -> ServedModel:
        """Read the model. Concurrent callers share one read, which outlives them if they are canceled.

        Raises `StartupError`.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(load_model, self._config, self.spec))
            self._reading.add_done_callback(self._done)
        return await asyncio.shield(self._reading)

    def _done(self, reading: asyncio.Task[ServedModel]) -> None:
        self._reading = None
        if reading.cancelled() or reading.exception() is not None:
            return
        self._model, self._failed_until = reading.result(), 0.0
        self._read_error = self._describe_error = ""
        self._file_limit = self._model.max_model_len
        if self._worker_limit is not None:
            self.set_max_model_len(self._worker_limit)

    async def card(self, status: ModelStatus) -> ModelCard:
        if self._model is not None:
            return self._model.card(status)
        if self._card is None:
            try:
                self._card = await asyncio.to_thread(describe_model, self.spec, self._created)
            except StartupError as error:
                spec, self._describe_error = self.spec, error.message
                return ModelCard(
                    id=spec.id, aliases=spec.aliases, created=self._created, prices=spec.prices, status="failed"
                )
            self._describe_error = ""
        return msgspec.structs.replace(self._card, status=status)

    def set_max_model_len(self, max_model_len: int) -> None:
        self._worker_limit = max_model_len
        if self._model is not None:
            self._model.max_model_len = min(self._file_limit, max_model_len)

    def _unavailable(self) -> EngineUnavailable:
        """Return the error for clients. The reason may name files of the server, so it is only logged."""
        message = f"The model {self.spec.id!r} cannot be loaded: the log of the server has the reason"
        return EngineUnavailable(message, code="model_unavailable")
