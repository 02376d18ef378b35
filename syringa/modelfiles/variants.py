"""Names of models on the Hugging Face Hub, and the files of a repository that a name refers to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from syringa.errors import ModelError

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+)|/([\w./-]+\.gguf))?", re.IGNORECASE | re.ASCII)
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree|blob|resolve)/main(?=/|$)")
_LATEST = ":latest"  # Ollama's tag for the variant that is chosen here
_MAX_REPOSITORY = 200  # characters; it becomes the name of a folder, and the Hub allows 96 on either side of the slash
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*))$", re.IGNORECASE)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_PREFERRED = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0")  # of a repository with several, the first that it has
# Files of a safetensors model beside its weights.
_FOLDER_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|processor_config|video_preprocessor_config|chat_template|hf_quant_config|quantize_config)\.json"
    r"|chat_template\.jinja|merges\.txt|tokenizer\.model|tekken\.json|LICENSE.*|.*\.safetensors\.index\.json"
    # Of sentence-transformers: its modules, some of which have a folder.
    r"|(modules|config_sentence_transformers|sentence_[a-z-]+_config)\.json"
    r"|\d+_[A-Za-z]+/(config\.json|model\.safetensors)"
)


class HubName(msgspec.Struct, frozen=True):
    """A repository, and which of its GGUF files: a quantization such as Q4_K_M, or the name of a file."""

    repository: str
    variant: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}:{self.variant}" if self.variant else self.repository


def strip_address(model: str) -> str:
    """Return the name on the Hub in the address of a repository or of a file, or `model` if it is none.

    `hf.co/org/repo:Q4_K_M` is `org/repo:Q4_K_M`, https://huggingface.co/org/repo/blob/main/file.gguf is
    `org/repo/file.gguf`.
    """
    address = _ADDRESS.match(model)
    if address is None:
        return model
    name = re.split("[?#]", model[address.end() :], maxsplit=1)[0].rstrip("/")
    return _PAGE.sub(r"\1", name).removesuffix(_LATEST)


def parse_hub_name(model: str) -> HubName | None:
    """Return what `org/repo`, `org/repo:Q4_K_M`, `org/repo:file.gguf`, `org/repo/file.gguf` or an address refers to."""
    model = strip_address(model)
    match = _NAME.fullmatch(model)
    if match is None or ".." in model or len(match[1]) > _MAX_REPOSITORY:
        return None
    return HubName(match[1], match[2] or match[3])


def quantization(file: str) -> str | None:
    """Return the quantization in the name of a GGUF file, or of the folder that it is in."""
    stem = _SPLIT.sub("", file[: -len(".gguf")])
    for part in (stem, stem.rpartition("/")[0]):
        if match := _QUANTIZATION.search(part):
            return match[1].upper()
    return None


def gguf_variants(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among the GGUF files of a repository, each with its parts in their order.

    The key is the quantization if there is one model of it, or else the name of the first file.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not _is_beside_a_model(file):
            models.setdefault(_SPLIT.sub("", file[: -len(".gguf")]), []).append(file)
    quantizations = [quantization(parts[0]) for parts in models.values()]
    variants = {}
    for parts, name in zip(models.values(), quantizations, strict=True):
        variants[name if name and quantizations.count(name) == 1 else parts[0]] = parts
    return variants


def _is_beside_a_model(file: str) -> bool:
    """Whether a GGUF file is a vision tower or an importance matrix, by its name."""
    name = file.rpartition("/")[2].lower()
    # A vision tower is `mmproj-X.gguf` or `X.mmproj-Q8_0.gguf`. A model may be `X-imatrix-Q4_0.gguf`.
    return "mmproj" in name or ("imatrix" in name and quantization(name) is None)


def select_gguf(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the GGUF files that `name` refers to. Without a variant: the only one, or the first of `_PREFERRED`."""
    variants = gguf_variants(files)
    if not variants:
        raise ModelError(f"{name.repository} has no GGUF files")
    if name.variant is not None:
        wanted = name.variant.lower()
        for key, parts in variants.items():
            if wanted == key.lower() or any(
                wanted in (part.lower(), part.rpartition("/")[2].lower()) for part in parts
            ):
                return parts
        raise ModelError(f"{name.repository} has no {name.variant}; it has {_listed(variants)}")
    if len(variants) == 1:
        return next(iter(variants.values()))
    for key in _PREFERRED:
        if key in variants:
            return variants[key]
    raise ModelError(f"{name.repository} has several models: add one of {_listed(variants)} after a colon")


def select_files(name: HubName, files: Sequence[str]) -> list[str]:
    """Return the files of a repository that a model needs: a GGUF, or safetensors and what belongs to them."""
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    if name.variant is None and weights and "config.json" in files:
        if "tokenizer.json" not in files:
            raise ModelError(f"{name.repository} has no tokenizer.json: {_tokenizer_advice(files)}")
        sharded = [file for file in weights if file.startswith("model")]
        return sorted({*(sharded or weights), *(file for file in files if _FOLDER_FILES.fullmatch(file))})
    if name.variant is None and not gguf_variants(files):
        raise ModelError(f"{name.repository} has neither safetensors with a config.json nor GGUF files")
    return select_gguf(name, files)


def _tokenizer_advice(files: Sequence[str]) -> str:
    if "tokenizer.model" in files or "tekken.json" in files:
        return (
            "download its files to a folder, and convert its tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return "choose another repository of the model"


def _listed(variants: Iterable[str]) -> str:
    return ", ".join(sorted(variants))
