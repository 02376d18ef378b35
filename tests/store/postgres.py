"""A PostgreSQL server for tests, if its programs are installed. It listens on a Unix socket only."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

INSTALL_FOLDER = "/usr/lib/postgresql"
_numbers = itertools.count()


def programs() -> Path | None:
    """Return the folder with initdb and pg_ctl: the newest installed version, or the one on the PATH."""
    found = sorted(Path(INSTALL_FOLDER).glob("*/bin"), key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    candidates = [*reversed(found), *([Path(on_path).resolve().parent] if on_path else [])]
    return next((path for path in candidates if all((path / name).exists() for name in ("initdb", "pg_ctl"))), None)


def why_not() -> str | None:
    """Return the reason why no server can be started, or None."""
    if programs() is None:
        return "PostgreSQL's initdb and pg_ctl are not installed"
    if os.geteuid() == 0 and (shutil.which("runuser") is None or not _has_user()):
        return "initdb refuses root, and there is no user postgres to run it"
    return None


def _has_user() -> bool:
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        return False
    return True


class Postgres:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="syr-pg", dir="/tmp"))
        self.folder.chmod(0o755)
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")

    def __enter__(self) -> Self:
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync=off -c max_connections=60"
        self._run("pg_ctl", "-D", self._data, "-w", "-t", "60", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-m", "immediate", "stop")

    def new_database(self) -> str:
        """Create an empty database, and return its URL."""
        import psycopg

        name = f"test{next(_numbers)}"
        with psycopg.connect(host=str(self.folder), user="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://postgres@/{name}?host={self.folder}"

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        command = [*user, str(folder / program), *arguments]
        # A file instead of a pipe: the server that pg_ctl starts would keep a pipe open.
        with (self.folder / "output").open("w+") as output:
            done = subprocess.run(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=120, check=False
            )
            output.seek(0)
            if done.returncode:
                raise RuntimeError(f"{program}: {output.read()}")
