from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from syringa.engine.processes.runtime_dir import runtime_dir

HOLDER = """
import os, sys, time
from syringa.engine.processes.runtime_dir import runtime_dir
with runtime_dir() as folder:
    open(folder + "/1.sock", "w").close()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _temporary_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_runtime_dir_is_private_and_removed_on_exit(tmp_path: Path) -> None:
    with runtime_dir() as folder:
        assert Path(folder).stat().st_mode & 0o077 == 0
        (Path(folder) / "x").touch()
    assert list(tmp_path.iterdir()) == []


def test_runtime_dir_removes_stale_ones_only(tmp_path: Path) -> None:
    other = tmp_path / "syringa-serve-other"
    other.mkdir()  # without a lock, its owner is unknown
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        with runtime_dir():
            assert (folder / "1.sock").exists()  # its owner is alive
        holder.kill()
        holder.wait()
        assert folder.exists()
        with runtime_dir() as own:
            assert {each.name for each in tmp_path.iterdir()} == {other.name, Path(own).name}
