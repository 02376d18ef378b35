"""The location of the database, by the setting `database`. Parsed without SQLAlchemy, so that errors come at once."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Literal

import msgspec

from syringa.errors import ConfigError, StartupError

FILE_NAME = "syringa.db"
_SCHEME = re.compile(r"([A-Za-z][\w+.-]*)://")
_PASSWORD = re.compile(r"(://[^/?#:@]*):[^/?#]*@|\b(password=)[^&\s]*")
_DRIVER = "postgresql+psycopg"
_POSTGRES = {"postgresql", "postgres", _DRIVER}


class DatabaseLocation(msgspec.Struct, frozen=True):
    """The absolute path of a SQLite file, or a PostgreSQL URL."""

    kind: Literal["sqlite", "postgresql"]
    target: str
    display: str  # for logs and messages, without a password

    def is_empty(self) -> bool:
        """Return whether the database certainly has no tables, because its file does not exist or is empty.

        The database is not opened for this: a server that stores nothing does not create a file.
        """
        if self.kind != "sqlite":
            return False
        try:
            if os.stat(self.target).st_size > 0:
                return False
            return os.stat(self.target + "-wal").st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # no permission to look: assume that it exists
            return False

    def can_be_created(self) -> bool:
        """Return whether the file could be created, as far as permissions tell."""
        path = Path(self.target)
        folder = next((each for each in path.parents if each.exists()), path.parent)
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def locate(database: str) -> DatabaseLocation:
    """Parse the setting. Raises `ConfigError` for an invalid value, `StartupError` for a missing driver."""
    database = database.strip()
    scheme = _SCHEME.match(database)
    if scheme is None:
        return _file(Path(database).expanduser() if database else data_folder() / FILE_NAME)
    if scheme[1] in _POSTGRES:
        if importlib.util.find_spec("psycopg") is None:
            raise StartupError("PostgreSQL needs psycopg: pip install 'syringa[postgres]'")
        return DatabaseLocation("postgresql", f"{_DRIVER}://{database[scheme.end() :]}", hide_password(database))
    if scheme[1] == "sqlite" and database.startswith("sqlite:///") and len(database) > len("sqlite:///"):
        return _file(Path(database.removeprefix("sqlite:///")).expanduser())
    raise ConfigError(
        f"database {hide_password(database)!r}: expected a file's path, sqlite:///PATH or postgresql://USER@HOST/NAME",
        param="database",
    )


def hide_password(text: str) -> str:
    return _PASSWORD.sub(lambda found: f"{found[1]}:***@" if found[1] else f"{found[2]}***", text)


def data_folder() -> Path:
    """Return the folder of this platform for a user's application data."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "syringa"
    configured = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(configured):  # XDG: a relative path is ignored
        return Path(configured) / "syringa"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "syringa"
    return Path.home() / ".local" / "share" / "syringa"


def _file(path: Path) -> DatabaseLocation:
    if path.name == ":memory:" or path.is_dir():
        raise ConfigError(f"database {str(path)!r}: expected the path of a file", param="database")
    return DatabaseLocation("sqlite", str(path.absolute()), str(path))
