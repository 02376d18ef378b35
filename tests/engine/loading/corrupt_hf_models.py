"""Loads corrupt GGUF files that `loading.gguf_parameters` reads, for the native decoder and for `transformers`.

`corrupt_models.py` does it with those of the Llama family.

python -m tests.engine.loading.corrupt_hf_models --seed 1 --count 1000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch

from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.scheduling.oom import is_oom
from syringa.errors import StartupError
from syringa.modelfiles import read_gguf
from tests.engine.loading.corrupt_models import CPU_SECONDS, MEMORY, check_line, check_logits
from tests.engine.models.gguf_models import WIDE, WIDE_EXPERTS, Quantize, random_quantization, save_gguf
from tests.modelfiles.gguf_mutations import (
    Corruption,
    corrupt_randomly,
    corrupt_tensor,
    corrupt_values,
    header_fields,
    replace,
)

# The types of matrices and of experts; None: F32, with tensors that only such files have.
FAMILIES: dict[str, tuple[str, str] | None] = {
    "gemma3": ("Q6_K", ""),
    "phi3": ("Q4_0", ""),
    "qwen3moe": ("Q8_0", "Q4_K"),
    "gpt-oss": ("Q8_0", "MXFP4"),
    # On transformers' definitions.
    "glm4": ("Q6_K", ""),
    "qwen2moe": ("Q8_0", "Q4_K"),
    "granite": None,
}
DTYPES = ("gguf", "int8", "gguf", "fp32")


def small_model(folder: Path, family: str) -> bytes:
    """Return a GGUF file of a tiny model."""
    changes = WIDE | WIDE_EXPERTS.get(family, {}) | {"vocab_size": 64}
    kinds = FAMILIES[family]
    quantize: Quantize | None = random_quantization(*kinds) if kinds else None
    return save_gguf(folder / family, family, quantize, **changes)[0].read_bytes()


def try_load(path: Path, dtype: str) -> str:
    """Load a model and compute logits. Return the outcome; raise `AssertionError` if it is not an allowed one."""
    try:
        loaded = load_model(LoadOptions(model=str(path), dtype=dtype, threads=2, kv_cache_tokens=256, max_running=2))
    except StartupError as error:
        check_line(error.message)
        return "refused"
    except (MemoryError, RuntimeError) as error:
        if is_oom(error):
            return "too little memory"
        raise
    return check_logits(loaded)


class CorruptFiles:
    def __init__(self, folder: Path, seed: int) -> None:
        self.choice = random.Random(seed)
        torch.manual_seed(seed)
        self.files = {family: small_model(folder, family) for family in FAMILIES}
        self.tensors = {family: list(read_gguf(folder / family / "model.gguf").tensors.values()) for family in FAMILIES}
        self.fields = {family: header_fields(data) for family, data in self.files.items()}

    def corrupt(self, index: int) -> Corruption:
        """Return a corrupt file, of each family in turn: in a field, anywhere, or in a tensor."""
        family = list(self.files)[index % len(self.files)]
        data = self.files[family]
        match self.choice.randrange(3):
            case 0:
                field = self.choice.choice(self.fields[family])
                value = self.choice.choice(corrupt_values(data, field))
                found = Corruption(f"{field.name} is {value}", replace(data, field, value))
            case 1:
                found = corrupt_randomly(data, self.choice)
            case _:
                tensor = self.choice.choice(self.tensors[family])
                found = corrupt_tensor(data, tensor.offset, tensor.size, self.choice)
                found = found._replace(name=f"{tensor.name}: {found.name}")
        return found._replace(name=f"{family}: {found.name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--last", type=Path, default=None)
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        corrupt, path = CorruptFiles(Path(name), options.seed), Path(name) / "m.gguf"
        for family, data in corrupt.files.items():
            path.write_bytes(data)
            for dtype in sorted(set(DTYPES)):
                assert try_load(path, dtype) == "loaded", (family, dtype)
        # A corrupt size must not be allocated.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for index in range(options.count):
            found = corrupt.corrupt(index)
            # A new file: threads of transformers' loader may still read the mapped one after another has failed.
            path.unlink()
            path.write_bytes(found.data)
            dtype = corrupt.choice.choice(DTYPES)
            if options.last:
                options.last.write_text(f"{index}: {found.name}, {dtype}")
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process if a loop does not end
            try:
                outcomes[try_load(path, dtype)] += 1
            except Exception:
                failures.append(f"{index}: {found.name}, {dtype}: {traceback.format_exc(limit=-3)}")
            signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    main()
