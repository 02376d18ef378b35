from __future__ import annotations

from pathlib import Path

from syringa.config import Config
from syringa.service.app_state import AppState
from syringa.service.auth.keys import ANONYMOUS


def counted(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if line.startswith("syringa_requests_total{")]


async def test_requests_are_counted_together_and_none_is_missed(tmp_path: Path) -> None:
    work = AppState(Config(database=str(tmp_path / "a.db")))
    work.books.open(ANONYMOUS, "/v1/completions", "before").close()
    await work.start()
    for name in ("a", "b"):
        account = work.books.open(ANONYMOUS, "/v1/completions", name)
        account.model = "m"
        account.close()
    shown = counted(await work.metrics.render({}))
    assert sum(float(line.rpartition(" ")[2]) for line in shown) == 3
    assert counted(await work.metrics.render({})) == shown
    assert work.meter is not None
    await work.meter.flush()
    rows = await work.state.database.usage.rows(after=None, limit=10)
    assert {row.request_id for row in rows} == {"a", "b"}
    work.books.open(ANONYMOUS, "/v1/completions", "c").close()
    await work.close()
    again = AppState(Config(database=str(tmp_path / "a.db")))
    rows = await again.state.database.usage.rows(after=None, limit=10)
    assert {row.request_id for row in rows} == {"a", "b", "c"}
    await again.close()
