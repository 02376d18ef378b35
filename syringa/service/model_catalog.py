"""Models configured at run time: stored in the database, and known to every process within a second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from syringa.config import Config, ModelSpec, ReadDefaults, read_model
from syringa.errors import StartupError, StoreError
from syringa.service.store_poller import StoreRevisions
from syringa.store import Store, StoredModel

logger = logging.getLogger("syringa.service")


class ModelCatalog:
    """The stored models of a server. Reads and writes them, and follows the changes of other processes."""

    def __init__(
        self,
        store: Store,
        config: Config,
        apply: Callable[[Sequence[ModelSpec]], None],
        read_defaults: ReadDefaults | None = None,
    ) -> None:
        """`apply` is called with all stored models whenever any has changed."""
        self._store, self._config, self._apply, self._read_defaults = store, config, apply, read_defaults
        self._revision = 0  # the revision of a database without models

    async def start(self) -> None:
        """Load the models. An unavailable database is not an error."""
        await self.refresh(StoreRevisions(self._store))

    def read(self, id: str, fields: dict[str, object]) -> ModelSpec:
        """Parse a definition. Raises `ConfigError`, whose `param` is the invalid field."""
        return read_model(fields | {"id": id}, self._config, self._read_defaults)

    async def put(self, spec: ModelSpec, fields: dict[str, object]) -> None:
        """Store a model's fields as given, so that missing ones follow later changes of the settings."""
        definition = msgspec.json.encode(fields).decode()
        await self._store.write(lambda session: session.models.put(spec.id, definition))
        await self._reload(StoreRevisions(self._store))

    async def delete(self, id: str) -> bool:
        found = await self._store.write(lambda session: session.models.delete(id))
        await self._reload(StoreRevisions(self._store))
        return found

    async def refresh(self, revisions: StoreRevisions) -> None:
        """Reload the models if they have changed."""
        try:
            await self._reload(revisions)
        except StoreError as error:
            logger.debug("model catalog: refresh failed: %s", error.message)
        except Exception:
            logger.exception("model catalog: refresh failed")

    async def _reload(self, revisions: StoreRevisions) -> None:
        if self._store.location.is_empty() or await revisions.get("models") == self._revision:
            return
        self._revision, models = await self._store.poll(lambda session: session.models.snapshot())
        self._apply([spec for model in models if (spec := self._spec(model)) is not None])

    def _spec(self, model: StoredModel) -> ModelSpec | None:
        """Parse a stored model; None if it is invalid, e.g. because another version wrote it."""
        try:
            return self.read(model.id, msgspec.json.decode(model.definition, type=dict[str, object]))
        except (StartupError, msgspec.DecodeError) as error:
            logger.error("model catalog: stored model is invalid: model=%s error=%s", model.id, error)
            return None
