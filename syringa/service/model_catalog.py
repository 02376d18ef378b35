"""Models that were configured while the server runs: kept in the store, and known to every process within a second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from syringa.config import Config, ModelSpec, ReadDefaults, read_model
from syringa.errors import StartupError, StoreError
from syringa.service.auth.key_cache import is_absent
from syringa.store import ModelRow, Store

logger = logging.getLogger("syringa.service")


class Catalogue:
    def __init__(
        self,
        store: Store,
        config: Config,
        apply: Callable[[Sequence[ModelSpec]], None],
        read_defaults: ReadDefaults | None = None,
    ) -> None:
        """`apply` is called with all of them whenever any has changed."""
        self._store, self._config, self._apply, self._read_defaults = store, config, apply, read_defaults
        self._revision = 0  # of a store in which there never was one

    def read(self, id: str, fields: dict[str, object]) -> ModelSpec:
        """Raises `ConfigError`, whose `param` is the field at fault."""
        return read_model(fields | {"id": id}, self._config, self._read_defaults)

    async def put(self, spec: ModelSpec, fields: dict[str, object]) -> None:
        """Keeps a model as it was described: what was not said of it follows the settings, also when they change."""
        await self._store.models.put(spec.id, msgspec.json.encode(fields).decode())
        await self.refresh()

    async def delete(self, id: str) -> bool:
        found = await self._store.models.delete(id)
        await self.refresh()
        return found

    async def refresh(self) -> None:
        if is_absent(self._store) or await self._store.revision("models") == self._revision:
            return
        self._revision, rows = await self._store.models.snapshot()
        self._apply([spec for row in rows if (spec := self._spec(row)) is not None])

    def _spec(self, row: ModelRow) -> ModelSpec | None:
        """One that cannot be read, as another version wrote it, is left out: the others stay."""
        try:
            return self.read(row.id, msgspec.json.decode(row.definition, type=dict[str, object]))
        except (StartupError, msgspec.DecodeError) as error:
            logger.error("model %s is stored, and cannot be read: %s", row.id, error)
            return None

    async def look(self) -> None:
        """Does not fail: this is done over and over."""
        try:
            await self.refresh()
        except StoreError as error:
            logger.debug("models: %s", error.message)
        except Exception:
            logger.exception("the models could not be read")
