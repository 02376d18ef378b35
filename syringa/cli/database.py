"""Access to the store for commands that need no model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from syringa import config as settings
from syringa.errors import StartupError, StoreError
from syringa.store import Store
from syringa.store.url import hide_password

T = TypeVar("T")


def run_with_store(
    flags: Mapping[str, Any], file: Path | None, work: Callable[[Store], Awaitable[T]], *, create: bool = False
) -> T:
    """Run `work` on the store that `syringa serve` would use.

    Without `create`, a database that does not exist is an error, so that a mistyped path is noticed.
    """
    database = settings.load(flags, file=file).database
    logging.getLogger("syringa").addHandler(logging.NullHandler())  # failures are reported below

    async def run() -> T:
        async with Store(database) as store:
            if not create and store.location.is_empty():
                raise StartupError(
                    f"{store.location.display}: there is no database yet; `syringa keys create` and `syringa serve` "
                    "create it, and --database or --config choose another"
                )
            try:
                return await work(store)
            except StoreError as error:
                raise StartupError(f"{store.location.display}: {_reason(error)}") from None

    return asyncio.run(run())


def _reason(error: StoreError) -> str:
    cause = error.__cause__
    reason = str(getattr(cause, "orig", None) or cause or error.message).strip() or error.message
    return hide_password(reason.splitlines()[0])
