"""Pools that an operator has opened or closed, remembered over restarts in a file."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger("syringa.fleet")


class PoolOverrides:
    """What operators want of pools: True: open, False: closed, whatever their schedules say."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, which need not exist; None: nothing is remembered over a restart."""
        self._path = path
        self._open: dict[str, bool] = {}
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._open = msgspec.json.decode(path.read_bytes(), type=dict[str, bool])
                except (OSError, msgspec.MsgspecError) as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    logger.error("opened and closed pools cannot be read: file=%s reason=%r", path, str(error))

    def get(self, pool: str) -> bool | None:
        return self._open.get(pool)

    def set(self, pool: str, open: bool | None) -> None:
        if open is None:
            self._open.pop(pool, None)
        else:
            self._open[pool] = open
        self._write()

    def _write(self) -> None:
        """Replace the file at once, so that a crash leaves the old one or the new one."""
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(self._open))
            os.replace(new, self._path)
        except OSError as error:
            logger.error("opened and closed pools cannot be stored: file=%s reason=%r", self._path, str(error))
