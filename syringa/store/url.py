"""Where the database is, by the setting `database`. Read without SQLAlchemy, so that a mistake is told at once."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from syringa.errors import ConfigError, StartupError

FILE_NAME = "syringa.db"
CLOCK_SECONDS = 0.1  # more than the clock of any file system is coarse
_SCHEME = re.compile(r"([A-Za-z][\w+.-]*)://")
_PASSWORD = re.compile(r"(://[^/?#:@]*):[^/?#]*@|\b(password=)[^&\s]*")
_DRIVER = "postgresql+psycopg"
_POSTGRES = {"postgresql", "postgres", _DRIVER}


class Location(msgspec.Struct, frozen=True):
    """A database: a file's absolute path, or a URL. `shown` is what may be logged, without a password."""

    kind: Literal["sqlite", "postgresql"]
    place: str
    shown: str

    def mark(self) -> object:
        """Something that changes when the file does. None: that cannot be told from outside, or it was written to so
        lately that the next change might leave the same mark."""
        if self.kind != "sqlite":
            return None
        marks: list[object] = []
        for path in (self.place, self.place + "-wal"):
            try:
                found = os.stat(path)
            except OSError:
                marks.append(None)
                continue
            if abs(time.time() - found.st_mtime) < CLOCK_SECONDS:
                return None
            marks.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        return marks


def locate(database: str) -> Location:
    """Raises `ConfigError` for a setting that cannot be, `StartupError` where its driver is not installed."""
    database = database.strip()
    scheme = _SCHEME.match(database)
    if scheme is None:
        return _file(Path(database).expanduser() if database else data_folder() / FILE_NAME)
    if scheme[1] in _POSTGRES:
        if importlib.util.find_spec("psycopg") is None:
            raise StartupError("PostgreSQL needs psycopg: pip install 'syringa[postgres]'")
        return Location("postgresql", f"{_DRIVER}://{database[scheme.end() :]}", hide_password(database))
    if scheme[1] == "sqlite" and database.startswith("sqlite:///") and len(database) > len("sqlite:///"):
        return _file(Path(database.removeprefix("sqlite:///")).expanduser())
    raise ConfigError(
        f"database {hide_password(database)!r}: expected a file's path, sqlite:///PATH or postgresql://USER@HOST/NAME",
        param="database",
    )


def hide_password(text: str) -> str:
    return _PASSWORD.sub(lambda found: f"{found[1]}:***@" if found[1] else f"{found[2]}***", text)


def data_folder() -> Path:
    """Where this platform keeps an application's data for a user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "syringa"
    given = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(given):  # the XDG rules: a relative path counts as none
        return Path(given) / "syringa"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "syringa"
    return Path.home() / ".local" / "share" / "syringa"


def _file(path: Path) -> Location:
    if path.name == ":memory:" or path.is_dir():
        raise ConfigError(f"database {str(path)!r}: expected the path of a file", param="database")
    return Location("sqlite", str(path.absolute()), str(path))
