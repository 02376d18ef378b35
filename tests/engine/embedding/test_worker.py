"""An embedding model in a worker process, as `serve` and the commands start it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from syringa.config import Config
from syringa.engine.client.local import start_local
from syringa.errors import InvalidRequest
from syringa.types import EmbeddingRequest
from tests.engine.embedding.tiny_encoders import INPUTS, load, reference, save_encoder, vectors
from tests.engine.processes.supervisor_harness import request


@pytest.mark.slow
async def test_worker_serves_an_embedding_model(tmp_path: Path) -> None:
    tiny = save_encoder(tmp_path, "Bert", pooling="mean_tokens")
    config = Config(model=str(tmp_path), device="cpu", dtype="fp32", threads=1)
    async with start_local(config) as client:
        info = client.info
        assert info is not None
        assert (info.kind, info.dimensions, info.max_model_len) == ("embed", 64, 128)
        calls = [client.embed(EmbeddingRequest(id=str(i), inputs=[each])) for i, each in enumerate(INPUTS)]
        results = await asyncio.gather(*calls, client.embed(EmbeddingRequest(id="all", inputs=INPUTS)))
        rows = [np.frombuffer(result.values, "<f4").reshape(-1, result.width) for result in results]
        assert np.array_equal(np.concatenate(rows[:-1]), rows[-1])
        expected = reference(tiny.model, INPUTS, "mean_tokens")
        torch.testing.assert_close(torch.from_numpy(rows[-1].copy()), expected, atol=2e-5, rtol=0)
        assert np.array_equal(rows[-1], vectors(load(tmp_path, "fp32").model, INPUTS).numpy())
        with pytest.raises(InvalidRequest, match="generates no text"):
            await client.submit(request("text"), lambda delta: True)
        with pytest.raises(InvalidRequest, match="no tokens"):
            await client.embed(EmbeddingRequest(id="empty", inputs=[[]]))
        stats = await client.stats()
        assert stats.prompt_tokens == 2 * sum(map(len, INPUTS))
        assert stats.started == len(INPUTS) + 1
