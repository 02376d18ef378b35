"""Tiny embedding models and cross-encoders with random weights, saved as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from syringa.engine.embedding.batch import pack_inputs
from syringa.engine.embedding.loading import EmbeddingModel, LoadedEmbedding, load_embedding_model
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.modelfiles import locate, read_embedding_spec
from tests.engine.models.tiny_models import save_tokenizer

INPUTS = [
    [(7 * i * i + 3 * i + 11 * j) % 150 + 5 for i in range(length)] for j, length in enumerate((33, 2, 90, 17, 64))
]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


class TinyEncoder(NamedTuple):
    folder: Path
    model: Any  # as transformers runs it, in fp32


def save_encoder(folder: Path, family: str, *, labels: int = 0, pooling: str = "", **changes: Any) -> TinyEncoder:
    """Save a model of a family of `transformers`: with a classifier if it has labels.

    With `pooling`, the folder is one of sentence-transformers, which normalizes vectors.
    """
    import transformers

    sizes = SIZES | ({"num_key_value_heads": 2, "head_dim": 16} if family == "Qwen3" else {}) | changes
    config = getattr(transformers, f"{family}Config")(**sizes, **({"num_labels": labels} if labels else {}))
    torch.manual_seed(0)
    name = f"{family}ForSequenceClassification" if labels else f"{family}Model"
    model = getattr(transformers, name)(config).float().eval()
    for parameter in model.parameters():
        wide = parameter.dim() > 1
        parameter.data = torch.randn_like(parameter) * 0.1 if wide else parameter + torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if pooling:
        write_modules(folder, pooling)
    return TinyEncoder(folder, model)


def write_modules(folder: Path, pooling: str, *extra: tuple[str, str]) -> None:
    """Write the modules of sentence-transformers: encoder, pooling, others by class and folder, and norm."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *extra, ("Normalize", "9_Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in ("1_Pooling", "9_Normalize"):
        (folder / path).mkdir(exist_ok=True)
    settings = {"word_embedding_dimension": SIZES["hidden_size"], f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def load(folder: Path, dtype: str, *, native_kernels: bool = True) -> LoadedEmbedding:
    files = locate(str(folder))
    spec = read_embedding_spec(files)
    assert spec is not None
    options = LoadOptions(model=str(folder), dtype=dtype, device="cpu", native_kernels=native_kernels)
    return load_embedding_model(options, files, spec)


def vectors(model: EmbeddingModel, inputs: list[list[int]], seconds: list[int] | None = None) -> torch.Tensor:
    return model.forward(pack_inputs(inputs, seconds or ()))


Pool = Callable[[torch.Tensor], torch.Tensor]
POOLINGS: dict[str, Pool] = {
    "mean_tokens": lambda x: x.mean(0),
    "cls_token": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "max_tokens": lambda x: x.max(0).values,
    "weightedmean_tokens": lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / sum(range(1, len(x) + 1)),
}


def reference(model: Any, inputs: list[list[int]], pooling: str) -> torch.Tensor:
    """Return the normalized vectors of inputs by transformers' own definition, one input at a time."""
    rows = []
    with torch.inference_mode():
        for tokens in inputs:
            states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0].float()
            rows.append(POOLINGS[pooling](states))
    return torch.nn.functional.normalize(torch.stack(rows), dim=1)


def scores(model: Any, inputs: list[list[int]], seconds: list[int] | None = None) -> torch.Tensor:
    """Return the logits of pairs by transformers' own definition, one pair at a time."""
    rows = []
    with torch.inference_mode():
        for index, tokens in enumerate(inputs):
            types = torch.zeros(1, len(tokens), dtype=torch.int64)
            if seconds:
                types[0, seconds[index] :] = 1
            rows.append(model(input_ids=torch.tensor([tokens]), token_type_ids=types).logits[0].float())
    return torch.stack(rows)
