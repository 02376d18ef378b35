from __future__ import annotations

from pathlib import Path

import pytest

from syringa.errors import StoreUnavailable
from syringa.service.responses.background import BackgroundResponse, BackgroundResponses
from syringa.service.responses.recorder import ResponseRecorder
from syringa.store import StoredEvent
from tests.service.responses.test_manager import managed


async def test_background_response_limits_unstored_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.service.responses.background.MAX_UNSTORED_EVENTS", 100)
    async with managed(tmp_path) as manager:
        background = BackgroundResponse(ResponseRecorder(manager, "acme", "r"))
        for number in range(101):
            background.publish([StoredEvent(number, "{}")])
        with pytest.raises(StoreUnavailable):
            background.publish([StoredEvent(101, "{}")])


async def test_background_responses_reserve_capacity() -> None:
    background = BackgroundResponses(1)
    with (
        background.reserve(),
        pytest.raises(Exception, match="1 background responses are running"),
        background.reserve(),
    ):
        pass
    with background.reserve():
        pass
