"""Delete the files of models that were pulled: in the directory of pulled models, or in the Hugging Face cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from syringa.errors import ModelError
from syringa.modelfiles.gguf import forget_gguf, read_gguf
from syringa.modelfiles.locate import ModelFiles, hub_cache, models_dir


def is_pulled(files: ModelFiles) -> bool:
    """Whether files came by `pull`, and not from a path or a package."""
    return _repository(Path(files.path)) is not None or _is_inside(Path(files.path), models_dir())


def remove(files: ModelFiles) -> None:
    """Delete the files of a pulled model. Raises `ModelError` if they cannot be, or were not pulled.

    A worker that has them open keeps them until it ends.
    """
    if not is_pulled(files):
        raise ModelError(f"the files of {files.name} were not pulled, and are not deleted")
    path = Path(files.path)
    repository = _repository(path)
    try:
        if files.kind == "gguf":
            gguf = read_gguf(path)
            for part in sorted({*(tensor.file for tensor in gguf.tensors.values()), gguf.path}):
                _delete_file(Path(part), repository)
        else:
            shutil.rmtree(path if repository is None else repository)
    except OSError as error:
        raise ModelError(f"the files of {files.name} cannot be deleted: {error.strerror or error}") from error
    finally:
        forget_gguf()


def _delete_file(file: Path, repository: Path | None) -> None:
    """Delete a file, and in the Hugging Face cache also what it links to, unless another link does."""
    target = file.resolve()
    file.unlink(missing_ok=True)
    if repository is None or target == file or not _is_inside(target, repository):
        return
    links = (Path(folder, name) for folder, _, names in os.walk(repository / "snapshots") for name in names)
    if not any(link.resolve() == target for link in links):
        target.unlink(missing_ok=True)


def _repository(path: Path) -> Path | None:
    """Return the folder of a repository in the Hugging Face cache in which a path is."""
    cache = hub_cache()
    if not _is_inside(path, cache):
        return None
    name = path.absolute().relative_to(cache.absolute()).parts[0]
    return cache / name if name.startswith("models--") else None


def _is_inside(path: Path, folder: Path) -> bool:
    return path.absolute() != folder.absolute() and path.absolute().is_relative_to(folder.absolute())
