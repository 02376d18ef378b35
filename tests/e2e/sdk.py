"""Official client packages, each in an environment of its own under `.venvs/`: they pin each other's versions.

Made once and used again; the stamp carries the pins, so a changed pin makes the environment anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# Environment and pins, the newest. Those for JavaScript are the last that run on Node 20: openai 7 and ai 7 need 22.
OPENAI_PYTHON = ("openai-python", "openai==3.49.0")
LANGCHAIN = ("langchain", "langchain-openai==1.7.3")
OPENAI_AGENTS = ("openai-agents", "openai-agents==0.24.0")
INSTRUCTOR = ("instructor", "instructor==1.17.0")
OPENAI_JS = ("openai-js", "openai@6.49.0", "zod@4.6.7")
AI_SDK = ("ai-sdk", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.87", "zod@4.6.7")

VENVS = Path(__file__).resolve().parents[2] / ".venvs"
# What pip and npm say when no registry answers. Any other failure is a failure.
_UNREACHABLE = ("Retrying (", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ENETUNREACH", "ETIMEDOUT")


def python_with(name: str, *requirements: str) -> Path:
    """The interpreter of an environment that has `requirements`."""
    folder = VENVS / name
    python = folder / "bin" / "python"
    with _locked(name):
        if _made(folder, requirements):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(folder)])
        _call([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
        _stamp(folder).write_text(_pins(requirements))
    return python


def node_with(name: str, *packages: str) -> tuple[str, Path]:
    """Node, and the folder to run it in so that it finds `packages`."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node and npm are not installed")
    folder = VENVS / name
    with _locked(name):
        if _made(folder, packages):
            return node, folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        # Where no registry answers, npm would try for minutes.
        quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        _call([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-save", *quick, *packages])
        _stamp(folder).write_text(_pins(packages))
    return node, folder


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Keep other test processes from making the same environment."""
    VENVS.mkdir(exist_ok=True)
    with open(VENVS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(folder: Path, pins: Sequence[str]) -> bool:
    return _stamp(folder).exists() and _stamp(folder).read_text() == _pins(pins)


def _stamp(folder: Path) -> Path:
    return folder / "installed.txt"


def _pins(pins: Sequence[str]) -> str:
    return "\n".join(pins)


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        said = result.stdout + result.stderr
        if any(sign in said for sign in _UNREACHABLE):
            pytest.skip(f"no package registry can be reached: {' '.join(command[1:])}")
        pytest.fail(f"{' '.join(command)} failed:\n{said[-3000:]}")
