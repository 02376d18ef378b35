"""Client packages for embeddings and rerank against `syringa serve` with the default embedding model."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from syringa.errors import ModelError
from syringa.modelfiles import pull
from tests.e2e.sdk import COHERE, LANGCHAIN, OPENAI_PYTHON, python_with
from tests.e2e.server import Server, serve, wait_for

pytestmark = [pytest.mark.model, pytest.mark.slow]

KEY, MODEL = "a-key-for-tests", "all-MiniLM-L6-v2"
SCRIPTS = {
    "openai_embeddings_client.py": OPENAI_PYTHON,
    "langchain_embeddings_client.py": LANGCHAIN,
    "cohere_client.py": COHERE,
}
_FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    try:
        pull("embedding")
    except ModelError as error:
        pytest.skip(f"the embedding model cannot be fetched: {error.message}")
    settings = ("--served-model-name", "smollm2", "--max-model-len", "512", "--requests-per-minute", "0")
    with serve("--embedding-model", "embedding", "--api-key", KEY, *settings) as server:
        yield server


@pytest.mark.parametrize("script", SCRIPTS)
def test_client_package_passes_its_checks(server: Server, script: str) -> None:
    python = python_with(*SCRIPTS[script])
    command = [str(python), str(_FOLDER / script), server.url, KEY, MODEL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    errors = {line["name"]: line["error"] for line in map(json.loads, result.stdout.splitlines())}
    assert list(errors) == re.findall(r"^def (check_\w+)", (_FOLDER / script).read_text(), re.MULTILINE)
    assert not any(errors.values()), "\n".join(filter(None, errors.values()))


def test_vectors_of_the_api_equal_those_of_sentence_transformers(server: Server) -> None:
    """With the tokenization, the truncation and the pooling of the server, in int8."""
    cases = json.loads((_FOLDER.parent / "data" / "embedding_vectors.json").read_text())
    assert len(cases) > 100
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"input": [case["text"] for case in cases], "model": MODEL, "truncate": True}
    answer = httpx.post(server.url + "/v1/embeddings", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    got = np.array([each["embedding"] for each in answer.json()["data"]], dtype=np.float32)
    expected = np.stack([np.frombuffer(base64.b64decode(case["vector"]), "<f2") for case in cases]).astype(np.float32)
    cosines = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.99
    assert cosines.mean() > 0.999


def test_embedding_model_and_chat_model_are_used_and_accounted_for(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"input": ["a text", "another text"]}
    answer = httpx.post(server.url + "/v1/embeddings", json=body, headers=headers, timeout=120).json()
    assert answer["model"] == MODEL
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert httpx.post(server.url + "/v1/chat/completions", json=chat, headers=headers, timeout=120).status_code == 200

    def usage() -> dict[str, Any]:
        found = httpx.get(server.url + "/v1/usage?by=model", headers=headers, timeout=60).json()["data"]
        return {row["model"]: row for row in found}

    wait_for(lambda: {MODEL, "smollm2"} <= usage().keys())  # written about every second
    row = usage()[MODEL]
    assert row["output_tokens"] == 0
    assert row["input_tokens"] >= answer["usage"]["prompt_tokens"]
    metrics = httpx.get(server.url + "/metrics", headers=headers, timeout=60).text
    assert re.search(r'requests_total\{.*endpoint="/v1/embeddings".*\} [1-9]', metrics)
