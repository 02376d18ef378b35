"""A request's usage record is in the journal before the last bytes of its response are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineError
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.usage import writer
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
TERMINAL = (b"data: [DONE]", b"event: response.completed", b"event: response.failed")


class JournalAtEnd:
    """Records the journal's contents when the end of a response is about to be sent."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self._app, self._folder = app, folder
        self.contents: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def observe(message: Message) -> None:
            body = message.get("body", b"")
            if message["type"] == "http.response.body" and (
                not message.get("more_body") or any(end in body for end in TERMINAL)
            ):
                self.contents.append("".join(path.read_text() for path in self._folder.glob("*.jsonl")))
            await send(message)

        await self._app(scope, receive, observe)


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "hi"}),
        (RESPONSES, {"input": "hi", "store": False}),
        (RESPONSES, {"input": "hi"}),
        (RESPONSES + "/compact", {"input": "hi"}),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": -1}),
    ],
    ids=["chat", "completions", "responses", "stored response", "compaction", "refused"],
)
async def test_usage_record_is_in_journal_before_response_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool, fails: bool
) -> None:
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 60.0)  # all is stored then, however slow the machine is
    config = Config(database=str(tmp_path / "a.db"))
    app_state = AppState(config)
    await app_state.start()
    engine = FakeEngine("hello")
    if fails:
        engine.fail = EngineError("broken")
    app = create_app(config, SingleEngineProvider(engine), FixedModels([plain_model()]), app_state)
    observer = JournalAtEnd(app, tmp_path / "a.db-usage")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(observer), base_url="http://localhost") as http:
        extra = {"stream": True} if stream and "compact" not in path else {}
        answer = await http.post(path, json=body | extra, headers={"x-request-id": "the-request"})
        await answer.aread()
    assert observer.contents
    assert all('"request_id":"the-request"' in contents for contents in observer.contents)
    await app_state.close()
    assert (tmp_path / "a.db-usage" / "0.jsonl").read_bytes() == b""
