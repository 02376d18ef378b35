"""`/admin/series`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.api.series import SeriesReport
from syringa.config import Config
from tests.client import client
from tests.http.responses_client import responses_client

PATH = "/admin/series"


async def test_requests_are_in_the_series_when_they_are_stored(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with responses_client(database) as http:
        now = 1_700_000_000.0
        http.app_state.series._clock = lambda: now
        http.app_state.series._start = int(now)
        await http.respond("hi")
        await http.expect_error(400, temperature=99)
        http.app_state._observe_finished_requests()
        now += 10
        await http.app_state.series.sample()
        await http.app_state.store.open()
        await http.app_state.series.flush()
        monkeypatch.setattr("syringa.http.routes.series.time.time", lambda: now + 7)
        answer = await http.get(PATH, params={"range": "1m", "step": "10s"})
        assert answer.status_code == 200, answer.text
        found = msgspec.json.decode(answer.content, type=SeriesReport)
        assert (found.step_seconds, found.end, len(found.times)) == (10, 1_700_000_010, 6)
        (model,) = found.models
        assert (model.id, model.ok) == ("fake", [0, 0, 0, 0, 0, 1])
        assert model.totals.output_tokens > 0
        assert found.all.refused[-1] == 1
        assert found.all.errors == {"invalid_request": [0, 0, 0, 0, 0, 1]}
        assert (await http.get(PATH, params={"range": "1m", "model": "other"})).json()["models"] == []


async def test_series_without_a_database_are_empty_and_create_none(tmp_path: Path) -> None:
    async with client(config=Config(database=str(tmp_path / "db"))) as http:
        found = (await http.get(PATH)).json()
        assert (found["range_seconds"] // 300, found["step_seconds"], found["models"]) == (1, 10, [])
        assert (await http.get(PATH, params={"range": "30d"})).json()["step_seconds"] == 21_600
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize(
    "query",
    [
        {"range": "5"}, {"range": "m"}, {"range": ""}, {"range": "31d"}, {"range": "10s"}, {"range": "-5m"},
        {"range": "1h", "step": "7s"}, {"range": "30d", "step": "10s"}, {"step": "0s"}, {"until": "x"},
        {"window": "5m"}, {"range": "99999999d"},
    ],
)  # fmt: skip
async def test_invalid_query_is_refused(query: dict[str, Any]) -> None:
    async with client() as http:
        answer = await http.get(PATH, params=query)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in query


async def test_series_need_an_administrators_key() -> None:
    async with client(config=Config(api_key=("secret",))) as http:
        assert (await http.get(PATH)).status_code == 401
        assert (await http.get(PATH, headers={"authorization": "Bearer secret"})).status_code == 403


async def test_equal_requests_share_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []

    def count(rows: object, range: object) -> dict[str, Any]:
        computed.append(range)
        return {}

    monkeypatch.setattr("syringa.http.routes.series.report", count)
    now = 100.0
    monkeypatch.setattr("syringa.http.routes.series.time.monotonic", lambda: now)
    async with client(config=Config(database=str(tmp_path / "db"))) as http:
        for _ in range(3):
            await http.get(PATH, params={"range": "30d"})
        assert len(computed) == 1
        await http.get(PATH, params={"range": "30d", "model": "fake"})
        assert len(computed) == 2
        now += 60
        await http.get(PATH, params={"range": "30d"})
        assert len(computed) == 3
        for number in range(100):
            await http.get(PATH, params={"range": "30d", "model": str(number)})
        await http.get(PATH, params={"range": "30d"})  # which was dropped for the others
        assert len(computed) == 104
