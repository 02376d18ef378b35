"""One engine of `bench.embeddings`, in a process of its own: reads texts from standard input, answers with vectors.

    PYTHON bench/embedding_runner.py ENGINE MODEL THREADS [ONNX]

MODEL is the folder of the model; onnxruntime uses its tokenizer, and the ONNX file in the folder ONNX. Runs under the
interpreter of the environment that has the engine, so it imports nothing of this repository but for ENGINE `syringa`,
`syringa-fp32` and so on. A line in is `{"texts": [...], "batch": 64, "repeat": 3}`; the line out has the seconds of
each repetition, and the vectors if `vectors` is set.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[Sequence[str]], Any]  # texts to an array of vectors
MAX_TOKENS = 256  # of sentence-transformers' folder of all-MiniLM-L6-v2


def sentence_transformers(model: str, threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu")
    return lambda texts: loaded.encode(list(texts), batch_size=len(texts), show_progress_bar=False)


def onnxruntime(model: str, threads: int, onnx: str) -> Embed:
    import numpy as np
    import onnxruntime as ort
    import tokenizers

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(str(next(Path(onnx).rglob("*.onnx"))), options, providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(MAX_TOKENS)

    def embed(texts: Sequence[str]) -> Any:
        encoded = tokenizer.encode_batch(list(texts))
        mask = np.array([each.attention_mask for each in encoded], dtype=np.int64)
        given = {"input_ids": np.array([each.ids for each in encoded], dtype=np.int64), "attention_mask": mask}
        given["token_type_ids"] = np.zeros_like(mask)
        states = session.run(None, {name: array for name, array in given.items() if name in names})[0]
        pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True) if states.ndim == 3 else states
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    return embed


def syringa(model: str, threads: int, dtype: str = "auto") -> Embed:
    import itertools

    import numpy as np

    from syringa.engine.cpu.features import disable_broken_amx

    disable_broken_amx(dtype)
    from syringa.engine.embedding.engine import EmbeddingEngine
    from syringa.engine.embedding.loading import load_embedding_model
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.modelfiles import load_tokenizer, locate, read_embedding_spec
    from syringa.types import EmbeddingRequest

    files = locate(model)
    spec = read_embedding_spec(files)
    assert spec is not None, f"{model} is no embedding model"
    engine = EmbeddingEngine(
        load_embedding_model(LoadOptions(model=model, dtype=dtype, threads=threads, device="cpu"), files, spec)
    )
    tokenizer = load_tokenizer(files)
    tokenizer.no_padding()
    tokenizer.enable_truncation(spec.max_length)
    ids = itertools.count()

    def embed(texts: Sequence[str]) -> Any:
        inputs = [each.ids for each in tokenizer.encode_batch_fast(list(texts))]
        engine.embed(EmbeddingRequest(id=str(next(ids)), inputs=inputs))
        while not (done := engine.take_embedded()):
            engine.step()
        ((_, result),) = done
        return np.frombuffer(result.values, "<f4").reshape(-1, result.width)

    return embed


def main() -> None:
    engine, model, threads, *onnx = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    if engine.startswith("syringa"):
        embed = syringa(model, int(threads), engine.partition("-")[2] or "auto")
    elif engine == "onnxruntime":
        embed = onnxruntime(model, int(threads), *onnx)
    else:
        embed = sentence_transformers(model, int(threads))
    embed(["a first text, so that everything is loaded"])
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        texts, batch = task["texts"], task["batch"]
        batches = [texts[at : at + batch] for at in range(0, len(texts), batch)]
        seconds, found = [], []
        for _ in range(task.get("repeat", 1)):
            started = time.perf_counter()
            found = [embed(each) for each in batches]
            seconds.append(time.perf_counter() - started)
        vectors = [row.tolist() for part in found for row in part] if task.get("vectors") else []
        print(json.dumps({"seconds": seconds, "vectors": vectors}), file=answers, flush=True)


if __name__ == "__main__":
    main()
