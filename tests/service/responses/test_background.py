from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from syringa.errors import EngineOverloaded, StoreUnavailable
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
        background.reserve("acme"),
        pytest.raises(EngineOverloaded, match="1 background responses of this organization are running"),
        background.reserve("acme"),
    ):
        pass
    with background.reserve("acme"):
        pass


async def test_background_responses_use_the_whole_limit_when_alone_and_their_share_otherwise() -> None:
    background = BackgroundResponses(6)
    with contextlib.ExitStack() as held:
        for organization, admitted in (("first", 6), ("second", 3), ("third", 2)):
            for _ in range(admitted):
                held.enter_context(background.reserve(organization))
            with pytest.raises(EngineOverloaded):
                held.enter_context(background.reserve(organization))
