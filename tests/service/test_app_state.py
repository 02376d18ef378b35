from __future__ import annotations

from pathlib import Path

from syringa.config import Config
from syringa.service.app_state import AppState
from syringa.service.auth.keys import ANONYMOUS


def request_counts(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if line.startswith("syringa_requests_total{")]


async def test_app_state_counts_every_request_in_metrics_and_usage(tmp_path: Path) -> None:
    app_state = AppState(Config(database=str(tmp_path / "a.db")))
    app_state.start_accounting(ANONYMOUS, "/v1/completions", "before").close()
    await app_state.start()
    for name in ("a", "b"):
        accounting = app_state.start_accounting(ANONYMOUS, "/v1/completions", name)
        accounting.model = "m"
        accounting.close()
    shown = request_counts(await app_state.metrics.render({}))
    assert sum(float(line.rpartition(" ")[2]) for line in shown) == 3
    assert request_counts(await app_state.metrics.render({})) == shown
    await app_state.usage_writer.flush()
    records = await app_state.store.read(lambda session: session.usage.records())
    assert {record.request_id for record in records} == {"a", "b"}
    app_state.start_accounting(ANONYMOUS, "/v1/completions", "c").close()
    await app_state.close()
    again = AppState(Config(database=str(tmp_path / "a.db")))
    records = await again.store.read(lambda session: session.usage.records())
    assert {record.request_id for record in records} == {"a", "b", "c"}
    await again.close()
