"""The time that a request waits for its model, as the engine and the accounting see it."""

from __future__ import annotations

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import ReadyModel, SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.usage.accounting import RequestAccounting
from tests.chat_models import plain_model
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine

WAITED = 12.5


class QueuedEngine(FakeEngine):
    """An engine without a replica at first: it becomes ready after seconds that count toward `queue_timeout`."""

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        self.ready = True
        found = await super().wait_ready(background=background)
        return found._replace(waited=WAITED)


@pytest.mark.parametrize(
    ("path", "body", "first"),  # the number of engine requests that have waited
    [
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}, 1),
        ("/v1/completions", {"model": "fake", "prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"model": "fake", "prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}, 1),
        ("/v1/embeddings", {"model": "embedding", "input": "hi"}, 1),
    ],
    ids=["chat", "two prompts", "beam search", "embeddings"],
)
async def test_wait_for_a_replica_counts_in_the_queue_of_the_worker(
    path: str, body: dict[str, object], first: int
) -> None:
    engine, seen = QueuedEngine("hello"), list[RequestAccounting]()
    engine.ready = False
    app_state = AppState(Config())
    app_state.observers.append(seen.append)
    models = FixedModels([plain_model(), embedding_model(id="embedding")])
    app = create_app(Config(), SingleEngineProvider(engine), models, app_state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        for _ in range(2):
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
    requests = [*engine.requests, *engine.embedded]
    assert [each.waited for each in requests] == [WAITED] * first + [0.0] * (len(requests) - first)
    assert seen[0].load_seconds == 0.0  # the wait is queue time
