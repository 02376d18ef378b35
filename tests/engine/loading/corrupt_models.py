"""Loads corrupt models and reports how each ends; run as a process of its own, because a defect may crash it.

    python -m tests.engine.loading.corrupt_models --seed 1 --count 1000

Prints a JSON object with the number of models by outcome, and the failures. The corruption that is being loaded is
kept in the file `--last`, for the case of a crash.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.sampling.draw import draw_greedy, draw_plain
from syringa.engine.sampling.sampler_input import NO_TOKEN
from syringa.engine.scheduling.oom import is_oom
from syringa.errors import StartupError
from syringa.modelfiles import describe, load_tokenizer, locate, read_gguf
from tests.engine.gguf_blocks import random_blocks
from tests.engine.loading.corrupt_quantized import CorruptQuantizedFolders, load_as_on_gpu, pretend_gpu
from tests.engine.models.tiny_models import run
from tests.modelfiles.gguf_builder import StoredTensor, Tensor, gguf, llama
from tests.modelfiles.gguf_mutations import Corruption, corrupt_fields, corrupt_randomly, corrupt_tensor

HIDDEN, INTERMEDIATE, KV, VOCAB = 256, 256, 128, 16
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q5_K": 13,
    "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, KV),
    "attn_v": (HIDDEN, KV),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (HIDDEN, INTERMEDIATE),
    "ffn_up": (HIDDEN, INTERMEDIATE),
    "ffn_down": (INTERMEDIATE, HIDDEN),
}
TYPES = {
    "llama": [("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q4_1", "Q8_0")],
    "qwen2": [("IQ4_XS", "IQ4_NL", "MXFP4", "Q5_0", "Q5_1", "Q5_1", "Q2_K")],
    "qwen3": [("F32", "F16", "Q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0")],
}
DTYPES = ("gguf", "int8", "gguf", "int8", "fp32", "bf16")
MEMORY, CPU_SECONDS, MAX_LINE = 2 << 30, 60, 700
CONFIG_VALUES: tuple[Any, ...] = (0, -1, 1, 3, 2**31, 2**62, 1.5, 1e300, float("nan"), "x", None, [], {}, [1], True)


def small_gguf(architecture: str) -> bytes:
    """Return a model with blocks of many types, and the biases and norms of its architecture."""
    metadata = llama(
        general__architecture=architecture,
        **{
            f"{architecture}__embedding_length": HIDDEN,
            f"{architecture}__feed_forward_length": INTERMEDIATE,
            f"{architecture}__attention__head_count": 4,
            f"{architecture}__attention__head_count_kv": 2,
            f"{architecture}__attention__key_length": 64,
            f"{architecture}__rope__freq_base": 10000.0,
            f"{architecture}__rope__dimension_count": 64,
            f"{architecture}__block_count": len(TYPES[architecture]),
            "tokenizer__ggml__tokens": ["<|endoftext|>", "a", "b", "ab", *(f"t{i}" for i in range(VOCAB - 4))],
            "tokenizer__ggml__token_type": [3] + [1] * (VOCAB - 1),
        },
    )
    tensors: dict[str, Tensor] = {
        "token_embd.weight": _matrix("Q6_K", (HIDDEN, VOCAB), 99),
        "output_norm.weight": (HIDDEN,),
        "output.weight": _matrix("F16", (HIDDEN, VOCAB), 98),
    }
    for i, types in enumerate(TYPES[architecture]):
        tensors |= {f"blk.{i}.attn_norm.weight": (HIDDEN,), f"blk.{i}.ffn_norm.weight": (HIDDEN,)}
        if architecture == "qwen3":
            tensors |= {f"blk.{i}.attn_q_norm.weight": (64,), f"blk.{i}.attn_k_norm.weight": (64,)}
        for seed, (name, type_name) in enumerate(zip(SHAPES, types, strict=True)):
            tensors[f"blk.{i}.{name}.weight"] = _matrix(type_name, SHAPES[name], seed)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{i}.{name}.bias"] = (SHAPES[name][1],)
    return gguf(metadata, tensors)


def _matrix(type_name: str, shape: tuple[int, int], seed: int) -> StoredTensor:
    inputs, rows = shape
    if type_name in ("F32", "F16"):
        values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 0.06
        data = values.to(torch.float32 if type_name == "F32" else torch.float16).numpy().tobytes()
    else:
        data = random_blocks(type_name, rows, inputs, seed, scale=1e-4).tobytes()
    return StoredTensor(shape, NUMBERS[type_name], data)


def try_load(model: Path, dtype: str) -> str:
    """Load a model and compute logits. Return the outcome; raise `AssertionError` if it is not an allowed one.

    `dtype`: on a CPU; "gpu": load it as on a GPU, as it is stored.
    """
    try:
        files = locate(str(model))
        describe(files)
        load_tokenizer(files)
        if dtype == "gpu":
            loaded = load_as_on_gpu(model)
        else:
            options = LoadOptions(model=str(model), dtype=dtype, threads=2, kv_cache_tokens=256, max_running=2)
            loaded = load_model(options)
    except StartupError as error:
        check_line(error.message)
        return "refused"
    except (MemoryError, RuntimeError) as error:
        if is_oom(error):
            return "too little memory"
        raise
    return check_logits(loaded)


def check_line(message: str) -> None:
    assert message.strip()
    assert "\n" not in message, message
    assert len(message) < MAX_LINE, message


def check_logits(loaded: LoadedModel) -> str:
    logits = run(loaded, [[1, 2, 3, 4, 5]])[0]
    tokens = draw_greedy(logits), draw_plain(logits, torch.ones(len(logits)), torch.full((len(logits),), 0.5).double())
    usable, broken = logits.isfinite().all(-1), (logits.isnan() | logits.isposinf()).any(-1)
    for drawn in tokens:
        assert bool((drawn[broken] == NO_TOKEN).all()), "a token was drawn from NaN or infinity"
        assert bool((drawn[usable] != NO_TOKEN).all()), "no token was drawn from finite logits"
    return "loaded" if bool(usable.all()) else "no usable logits"


class CorruptModels:
    """A source of corrupt models by their number; `quantized` is one of quantized folders."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.choice = random.Random(seed)
        self.files = {name: small_gguf(name) for name in TYPES}
        self.fields = {name: list(corrupt_fields(data)) for name, data in self.files.items()}
        self.tensors = {}
        for name, data in self.files.items():
            (folder / "whole.gguf").write_bytes(data)
            self.tensors[name] = list(read_gguf(folder / "whole.gguf").tensors.values())
        self.safetensors, self.config = save_folder(folder / "whole", self.files["llama"])
        self.quantized = CorruptQuantizedFolders(folder / "quantized", self.choice, CONFIG_VALUES)

    def write(self, index: int) -> tuple[str, Path]:
        """Write a corrupt model. Return what is wrong with it, and where it is."""
        kinds: list[Callable[[], tuple[str, Path]]] = [self._field, self._random, self._tensor, self._folder]
        return kinds[index % len(kinds)]()

    def _field(self) -> tuple[str, Path]:
        name = self.choice.choice(list(self.files))
        return self._gguf(self.choice.choice(self.fields[name]))

    def _random(self) -> tuple[str, Path]:
        return self._gguf(corrupt_randomly(self.files[self.choice.choice(list(self.files))], self.choice))

    def _tensor(self) -> tuple[str, Path]:
        name = self.choice.choice(list(self.files))
        tensor = self.choice.choice(self.tensors[name])
        found = corrupt_tensor(self.files[name], tensor.offset, tensor.size, self.choice)
        return self._gguf(found._replace(name=f"{tensor.name}: {found.name}"))

    def _gguf(self, corruption: Corruption) -> tuple[str, Path]:
        path = self.folder / "m.gguf"
        path.write_bytes(corruption.data)
        return corruption.name, path

    def _folder(self) -> tuple[str, Path]:
        path, choice = self.folder / "whole", self.choice
        weights, config, index = self.safetensors, self.config, None
        match choice.randrange(5):
            case 0:
                key = choice.choice(list(config))
                config = {**config, key: choice.choice(CONFIG_VALUES)}
                name = f"{key} is {config[key]!r}"
            case 1:
                length = choice.choice((0, 1, 2**20, 2**40, 2**63, 2**64 - 1))
                weights, name = struct.pack("<Q", length) + weights[8:], f"header of {length} bytes"
            case 2:
                at = choice.randrange(len(weights))
                weights, name = weights[:at], f"cut at {at}"
            case 3:
                at = choice.randrange(struct.unpack_from("<Q", weights)[0] + 8)
                weights, name = weights[:at] + choice.randbytes(1) + weights[at + 1 :], f"byte {at}"
            case _:
                index = choice.choice(("", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}'))
                name = f"index is {index!r}"
        (path / "model.safetensors").write_bytes(weights)
        (path / "config.json").write_text(json.dumps(config))
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        if index is not None:
            (path / "model.safetensors.index.json").write_text(index)
        return f"folder: {name}", path


def save_folder(folder: Path, model: bytes) -> tuple[bytes, dict[str, Any]]:
    """Write a folder with the model of a GGUF file. Return its weights and its config."""
    from safetensors.torch import save

    from syringa.engine.loading.weights import open_weights
    from syringa.engine.models.config import read_config
    from tests.engine.models.tiny_models import save_tokenizer

    folder.mkdir()
    path = folder.with_suffix(".gguf")
    path.write_bytes(model)
    files = locate(str(path))
    found = describe(files).config
    weights = open_weights(files, found)
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.0.{name}.weight" for name in layer]
    data = save({name: weights(name).to(torch.bfloat16).contiguous() for name in names})
    config = {**found, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    read_config(config)
    save_tokenizer(folder)
    return data, config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--quantized", action="store_true", help="quantized folders, instead of all others")
    parser.add_argument("--last", type=Path, default=None)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    pretend_gpu()
    with tempfile.TemporaryDirectory() as name:
        models = CorruptModels(Path(name), options.seed)
        for architecture, data in models.files.items():
            (Path(name) / "m.gguf").write_bytes(data)
            for dtype in sorted(set(DTYPES)):
                assert try_load(Path(name) / "m.gguf", dtype) == "loaded", (architecture, dtype)
        for kind in models.quantized.folders:
            for dtype in ("gpu", "int8"):
                assert try_load(models.quantized.write_whole(kind), dtype) == "loaded", (kind, dtype)
        # A corrupt size must not be allocated.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for index in range(options.count):
            label, path = models.quantized.write() if options.quantized else models.write(index)
            dtype = DTYPES[models.choice.randrange(len(DTYPES))]
            if path.name == models.quantized.folder.name:
                dtype = "gpu" if index % 2 else "int8"
            elif path.is_dir() and dtype == "gguf":
                dtype = "int8"
            if options.last:
                options.last.write_text(f"{index}: {label}, {dtype}")
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process if a loop does not end
            try:
                outcome = try_load(path, dtype)
                outcomes[outcome] += 1
                # Of corrupt sizes, only the length of a context may be plausible and yet too large.
                assert outcome != "too little memory" or "context_length" in label or "max_position" in label
            except Exception:
                failures.append(f"{index}: {label}, {dtype}: {traceback.format_exc(limit=-3)}")
            signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    main()
