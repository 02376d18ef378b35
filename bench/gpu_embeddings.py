"""Check embedding models on a GPU, and time them beside `transformers`: `python -m bench.gpu_embeddings`.

Models have real shapes and random weights, made on the GPU and saved as folders, which the engine loads as it loads any
other. The vectors of 64 inputs of mixed lengths are compared with those of `transformers` in fp32, one input at a time;
inputs per second, with those of `transformers` in bf16 on padded batches, sorted by length. Exits with 1 if a vector
differs by more than bf16 explains. The table goes to $OUT/gpu-embeddings.json as well, if $OUT is set. `--quick` has
small models and works on a CPU, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import log
from syringa.engine.embedding.batch import pack_inputs
from syringa.engine.embedding.engine import EmbeddingEngine
from syringa.engine.embedding.loading import LoadedEmbedding, load_embedding_model
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.modelfiles import locate, read_embedding_spec
from syringa.types import EmbeddingRequest

BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, pooling and sizes
    "bert-base": ("Bert", "mean_tokens", BERT | {"vocab_size": 30_522, "max_position_embeddings": 512}),
    "bge-m3 (XLM-R large)": (
        "XLMRoberta",
        "cls_token",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 250_002,
            "max_position_embeddings": 8194,
            "pad_token_id": 1,
        },
    ),
    "Qwen3-Embedding-0.6B": (
        "Qwen3",
        "lasttoken",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151_669,
            "max_position_embeddings": 32_768,
            "pad_token_id": 0,
        },
    ),
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
COUNT, LONGEST, ROUNDS = 64, 500, 15
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAST_COSINE = 0.999  # bf16 against fp32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    inputs = mixed_inputs()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE, "models": {}}
    failed = False
    for name, (family, pooling, sizes) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            small = SMALL | ({"head_dim": 16, "num_key_value_heads": 2} if family == "Qwen3" else {})
            definition = save_folder(Path(folder), family, pooling, sizes | (small if quick else {}))
            loaded = load_folder(folder)
        found = report["models"][name] = compare(definition, loaded, pooling, inputs)
        log(f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in found.items()))
        failed |= not found["least cosine"] >= LEAST_COSINE or found["engine differs"] > 0
        del definition, loaded
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if out := os.environ.get("OUT"):
        (Path(out) / "gpu-embeddings.json").write_text(json.dumps(report, indent=2) + "\n")
    return int(failed)


def mixed_inputs() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(5, 30_000) for _ in range(draw.randint(4, LONGEST))] for _ in range(COUNT)]


def save_folder(folder: Path, family: str, pooling: str, sizes: dict[str, Any]) -> Any:
    """Save a model with random weights as sentence-transformers would. Return its definition, in fp32."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = getattr(transformers, f"{family}Model")(config).float().eval()
    for parameter in model.parameters():  # wider than a fresh model's, whose vectors hardly depend on the input
        noise = torch.randn_like(parameter)
        parameter.data = noise * 0.04 if parameter.dim() > 1 else parameter + noise * 0.1
        parameter.data = parameter.data.bfloat16().float()  # what a checkpoint in bf16 holds
    model.save_pretrained(folder)
    vocabulary = {f"t{each}": each for each in range(int(sizes["vocab_size"]))}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    modules = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": sizes["hidden_size"], f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return model


def load_folder(folder: str) -> LoadedEmbedding:
    files = locate(folder)
    spec = read_embedding_spec(files)
    assert spec is not None
    return load_embedding_model(
        LoadOptions(model=folder, dtype="auto" if DEVICE == "cuda" else "bf16", device=DEVICE), files, spec
    )


def compare(definition: Any, loaded: LoadedEmbedding, pooling: str, inputs: list[list[int]]) -> dict[str, float]:
    """Return the agreement with `transformers`, and the speed of both."""
    batch = pack_inputs(inputs)
    expected = torch.cat([pooled(definition, [tokens], pooling) for tokens in inputs])
    got = loaded.model.forward(batch)
    cosines = (got * expected).sum(1)
    apart = (expected @ expected.T).fill_diagonal_(-1.0)
    definition = definition.bfloat16()
    by_length = sorted(inputs, key=len)
    groups = [by_length[first : first + 16] for first in range(0, COUNT, 16)]
    one = [each for each in inputs if len(each) >= 100][:1]
    return {
        "mean cosine": cosines.mean().item(),
        "least cosine": cosines.min().item(),
        "largest cosine of two inputs": apart.max().item(),
        "engine differs": float(engine_differs(loaded, inputs, got.cpu())),
        "inputs/s, 64": COUNT / median_seconds(lambda: loaded.model.forward(batch)),
        "transformers, 64": COUNT / median_seconds(lambda: [pooled(definition, each, pooling) for each in groups]),
        "inputs/s, 1": 1 / median_seconds(lambda: loaded.model.forward(pack_inputs(one))),
        "transformers, 1": 1 / median_seconds(lambda: pooled(definition, one, pooling)),
    }


def engine_differs(loaded: LoadedEmbedding, inputs: list[list[int]], vectors: torch.Tensor) -> int:
    """Return how many vectors of the engine, whose steps are smaller, differ from those of one batch."""
    engine = EmbeddingEngine(loaded)
    for index, tokens in enumerate(inputs):
        engine.embed(EmbeddingRequest(id=str(index), inputs=[tokens]))
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(inputs):
        engine.step()
        for _, result in engine.take_embedded():
            results[int(result.request_id)] = torch.frombuffer(bytearray(result.values), dtype=torch.float32)
    return sum(not float(results[index] @ vectors[index]) >= LEAST_COSINE for index in range(len(inputs)))


@torch.inference_mode()
def pooled(definition: Any, inputs: list[list[int]], pooling: str) -> torch.Tensor:
    """Return the normalized vectors of a padded batch by the definition of `transformers`."""
    lengths = torch.tensor([len(tokens) for tokens in inputs])
    width = int(lengths.max())
    padding = definition.config.pad_token_id or 0
    ids = torch.tensor([tokens + [padding] * (width - len(tokens)) for tokens in inputs]).to(DEVICE)
    mask = (torch.arange(width)[None] < lengths[:, None]).to(DEVICE)
    states = definition(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
    if pooling == "mean_tokens":
        rows = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    elif pooling == "cls_token":
        rows = states[:, 0]
    else:
        rows = states[torch.arange(len(inputs)), lengths - 1]
    return torch.nn.functional.normalize(rows, dim=1)


def median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
