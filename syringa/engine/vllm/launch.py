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

MODULE = "syringa.engine.vllm.worker"


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
            pass_fds=(options.health_fd,),
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
