"""Requests with images through a worker process with a tiny model."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syringa.config import Config
from syringa.engine.client.local import start_local
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.types import EngineDelta, EngineRequest, Image
from tests.engine.vision.tiny_models import make_image, save


async def answer(client: Any, request: EngineRequest) -> list[EngineDelta]:
    deltas: list[EngineDelta] = []

    def take(delta: EngineDelta) -> bool:
        deltas.append(delta)
        return False

    await client.submit(request, take)
    return deltas


async def test_worker_handles_images_and_refusals(tmp_path: Any) -> None:
    model = save("smolvlm", tmp_path)
    config = Config(model=str(tmp_path), dtype="fp32", threads=1, kv_cache_tokens=256)
    async with start_local(config) as client:
        deltas = await answer(client, model.ask("a", "What is @?", make_image(1, 64, 32), max_tokens=4))
        assert [len(delta.tokens) for delta in deltas] == [1] * 4
        assert deltas[0].prompt_tokens > 20
        counted = model.ask("n", "What is @?", make_image(2, 64, 32))
        (delta,) = await answer(client, msgspec.structs.replace(counted, count_only=True))
        assert (delta.prompt_tokens, delta.tokens, delta.finish) == (deltas[0].prompt_tokens, [], "length")
        with pytest.raises(InvalidRequest, match="cannot be decoded") as caught:
            await answer(client, model.ask("b", "What is @?", Image(data=b"?", digest=b"?")))
        assert caught.value.param == "messages"
        with pytest.raises(InvalidRequest, match="0 image placeholders"):
            await answer(client, model.ask("c", "What is it?", make_image(1, 64, 32)))
        with pytest.raises(ContextLengthExceeded, match="context is 256 tokens") as too_long:
            await answer(client, model.ask("d", "@" * 8, *(make_image(i, 64, 64) for i in range(8))))
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
        assert len(await answer(client, model.ask("e", "Text.", max_tokens=3))) == 3
