"""Start a worker on vLLM, under the interpreter of the environment that vLLM is installed in."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import syringa
from syringa.engine.processes import managed_process
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError

MODULE = "syringa.engine.vllm.worker"
REQUIRED = ("vllm", "msgspec", "numpy", "tokenizers", "llguidance")  # the latter come with vLLM
MIN_PYTHON = (3, 11)
CHECK_SECONDS = 60.0

_CHECK = (
    "import importlib.util, sys; print(*sys.version_info[:2], "
    "*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))"
)


def check_interpreter(python: str) -> None:
    """Raise `ConfigError` for an interpreter that cannot run a worker. vLLM is not imported, which takes long."""
    command = [python or sys.executable, "-P", "-c", _CHECK, *REQUIRED]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CHECK_SECONDS)
        major, minor, *missing = found.stdout.split()
        version = int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{command[0]} cannot be run as a Python interpreter, 3.11 or newer: {error}") from error
    if version < MIN_PYTHON:
        raise ConfigError(f"{command[0]} is Python {major}.{minor}: a worker needs 3.11 or newer")
    if missing:
        raise ConfigError(f"{command[0]} has no module {missing[0]}: name the environment of vLLM with python")


def spawn_vllm_worker(options: WorkerOptions, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker. One that cannot be started exits at once and leaves the reason, like one that fails later."""
    variables = {
        **environment,
        "PYTHONPATH": package_path(Path(options.socket).parent),
        "PYTHONSAFEPATH": "1",  # nothing is imported from the folder that the server was started in
    }
    try:
        return managed_process.spawn(
            MODULE,
            options,
            pass_fds=options.inherited_fds,
            environment=variables,
            python=options.python or sys.executable,
        )
    except OSError as error:
        reason = f"{options.python} cannot be run: {error.strerror}"
        print(f"syringa: {reason}", file=sys.stderr)
        with contextlib.suppress(OSError):
            Path(options.reason_file).write_text(reason, encoding="utf-8")
        code = f"raise SystemExit({managed_process.EXIT_CANNOT_START})"
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def package_path(folder: Path) -> str:
    """Return a folder with this package and nothing else, to be found by another interpreter.

    The folder that the package is installed in has packages of this environment too, which must not shadow those of
    vLLM's.
    """
    path = folder / "packages"
    path.mkdir(exist_ok=True)
    (package,) = syringa.__path__
    with contextlib.suppress(FileExistsError):
        (path / "syringa").symlink_to(package, target_is_directory=True)
    return str(path)
