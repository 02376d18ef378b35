from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from syringa.engine.processes.runtime_dir import scratch

HOLDER = """
import os, sys, time
from syringa.engine.processes.runtime_dir import scratch
with scratch() as folder:
    open(folder + "/1.sock", "w").close()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_goes_with_its_owner(tmp_path: Path) -> None:
    with scratch() as folder:
        assert Path(folder).stat().st_mode & 0o077 == 0
        (Path(folder) / "x").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_has_left_goes_with_the_next(tmp_path: Path) -> None:
    other = tmp_path / "syringa-serve-other"
    other.mkdir()  # without a lock: nobody knows whose it is
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        with scratch():
            assert (folder / "1.sock").exists()  # its owner lives
        holder.kill()
        holder.wait()
        assert folder.exists()
        with scratch() as own:
            assert {each.name for each in tmp_path.iterdir()} == {other.name, Path(own).name}
