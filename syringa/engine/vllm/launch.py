"""Start a worker on vLLM, under the interpreter of the environment that vLLM is installed in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import syringa
from syringa.engine.processes import managed_process
from syringa.engine.vllm import bootstrap
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError

MODULE = "syringa.engine.vllm.bootstrap"
CHECK_SECONDS = 60.0
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the folder that the server was started in


def check_interpreter(python: str) -> None:
    """Raise `ConfigError` for an interpreter that cannot run a worker."""
    script = Path(bootstrap.__file__).read_text(encoding="utf-8")
    command = [python or sys.executable, "-c", script, bootstrap.CHECK]
    environment = {**os.environ, **_SAFE_PATH}
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=CHECK_SECONDS, env=environment
        ).stdout.strip()
    except subprocess.CalledProcessError as error:
        reason = f"it ended with {managed_process.describe_exit(error.returncode)}"
    except subprocess.TimeoutExpired:
        reason = f"it has not answered within {CHECK_SECONDS:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if found == bootstrap.PREFIX + bootstrap.OK:
            return
        if found.startswith(bootstrap.PREFIX) and "\n" not in found:
            raise ConfigError(found.removeprefix(bootstrap.PREFIX))
        reason = "it printed something else than was expected"
    raise ConfigError(f"{command[0]} cannot be run as a Python interpreter, 3.11 or newer: {reason}")


def spawn_vllm_worker(options: WorkerOptions, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker. One that cannot be started exits at once and leaves the reason, like one that fails later."""
    variables = {
        **environment,
        "PYTHONPATH": package_path(Path(options.socket).parent),
        **_SAFE_PATH,
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
