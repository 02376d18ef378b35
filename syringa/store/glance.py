"""A look at what has changed in a SQLite file, in the thread that asks.

Every process looks again and again, and sending a thread each time costs twenty times as much as the look. A reader of
such a file waits for nobody; what cannot be answered at once is not answered.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING
from urllib.parse import quote

from syringa.store.url import Location

if TYPE_CHECKING:
    import sqlite3

_REVISIONS = "SELECT name, number FROM revisions"


class Glance:
    def __init__(self, location: Location) -> None:
        self._location = location
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # what the path meant when it was opened

    def revisions(self) -> dict[str, int] | None:
        """None: this is for a thread to find out, with all the errors that there may be."""
        if self._location.kind != "sqlite":
            return None
        import sqlite3  # a server that stores nothing does without

        try:
            found = os.stat(self._location.place)
            if self._connection is None or self._file != (found.st_dev, found.st_ino):
                self.close()
                self._connection = sqlite3.connect(
                    f"file:{quote(self._location.place)}?mode=ro",
                    uri=True,
                    timeout=0,
                    isolation_level=None,
                    check_same_thread=False,
                )
                self._file = (found.st_dev, found.st_ino)
            return dict(self._connection.execute(_REVISIONS))
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None
