"""The real all-MiniLM-L6-v2, compared with vectors that sentence-transformers computed, in fp16.

There are about a hundred, of texts of a few words to a page; `bench.embeddings` compares those of 500 texts.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from syringa.errors import ModelError
from syringa.modelfiles import load_tokenizer, locate
from tests.engine.embedding.tiny_encoders import load, vectors

VECTORS = Path(__file__).parents[2] / "data" / "embedding_vectors.json"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [("fp32", 0.9999), ("int8", 0.99)])
def test_vectors_equal_those_of_sentence_transformers(dtype: str, least: float) -> None:
    try:
        files = locate("embedding")
    except ModelError:
        pytest.skip("the model is not here: syringa pull embedding")
    cases = json.loads(VECTORS.read_text())
    assert len(cases) > 100
    tokenizer = load_tokenizer(files)
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    inputs = [each.ids for each in tokenizer.encode_batch([case["text"] for case in cases])]
    got = vectors(load(Path(files.path), dtype).model, inputs).numpy()
    expected = np.stack([np.frombuffer(base64.b64decode(case["vector"]), "<f2") for case in cases]).astype(np.float32)
    cosines = (got * expected).sum(1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > least
    assert cosines.mean() > max(least, 0.999)
