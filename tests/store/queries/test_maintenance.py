from __future__ import annotations

import json

from syringa.store import ResponseKey, Store, StoredEvent
from syringa.store.store import PROCESS_LOST
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, conversation, items, read, response, statements, write


async def test_expire_deletes_in_chunks(store: Store) -> None:
    for n in range(45):
        stored = response(f"r{n}", organization=f"o{n % 3}", expires_at=START + n, output=tuple(items("o")))
        await write(store).responses.create(stored, items("i"))
        await write(store).events.append(f"o{n % 3}", f"r{n}", [StoredEvent(0, "{}")])
    await write(store).responses.create(response("stays"), items("i"))
    await write(store).conversations.create(conversation("c1", expires_at=START + 3), items("a"))
    await write(store).conversations.create(conversation("c2"), items("b"))
    with statements(store) as seen:
        assert await store.expire(START + 42) == 43 + 1
    assert sum(each.startswith("DELETE FROM responses") for each in seen) == 3
    assert await store.expire(START + 42) == 0
    assert await read(store).responses.get("o0", "r42") is None
    assert await read(store).responses.get("o1", "r43") is not None
    assert await read(store).responses.get(US, "stays") is not None
    assert await read(store).conversations.get(US, "c1") is None
    assert await read(store).conversations.get(US, "c2") is not None
    assert await read(store).chains.find_items(US, ["a", "b", "i"]) == {each.id: each for each in items("b", "i")}


async def test_expire_uses_clock(store: Store, clock: Clock) -> None:
    await write(store).responses.create(response("r1", expires_at=START + 5))
    assert await store.expire() == 0
    clock.now = START + 5
    assert await store.expire() == 1


async def test_fail_orphans_of_silent_process(store: Store, clock: Clock) -> None:
    await write(store).responses.create(response("r1", status="in_progress", process="gone"), items("i1"))
    await write(store).responses.create(response("r2", organization="other", status="queued", process="alive"))
    await write(store).responses.create(response("r3"))
    clock.now += 20
    assert await write(store).maintenance.heartbeat("alive") == [ResponseKey("other", "r2")]
    clock.now += 20
    assert await store.fail_orphans(silent_for=60) == []
    assert await store.fail_orphans(silent_for=30) == [ResponseKey(US, "r1")]
    assert await store.fail_orphans(silent_for=30) == []
    failed = await read(store).responses.get(US, "r1")
    assert failed is not None
    assert (failed.status, failed.process) == ("failed", None)
    body = json.loads(failed.body)
    assert body["status"] == "failed"
    assert body["error"] == {"code": "server_error", "message": PROCESS_LOST}
    assert body["metadata"] == {"ä": "\0"}
    alive = await read(store).responses.get("other", "r2")
    assert alive is not None
    assert alive.status == "queued"
    assert await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1")) == "failed"


async def test_fail_orphans_of_exited_process(store: Store) -> None:
    for n in range(30):
        await write(store).responses.create(response(f"r{n}", status="queued", process="dead"))
    await write(store).responses.create(response("mine", status="in_progress", process="alive"))
    failed = await store.fail_orphans(has_exited=lambda process: process == "dead", message="The server was restarted.")
    assert len(failed) == 30
    assert await write(store).maintenance.heartbeat("dead") == []
    assert await write(store).maintenance.heartbeat("alive") == [ResponseKey(US, "mine")]
    lost = await read(store).responses.get(US, "r7")
    assert lost is not None
    assert json.loads(lost.body)["error"]["message"] == "The server was restarted."


async def test_heartbeat_returns_responses_still_running(store: Store) -> None:
    for id in ("r1", "r2", "r3"):
        await write(store).responses.create(response(id, status="in_progress"))
    await write(store).responses.finish(US, "r1", status="cancelled", body="{}")
    await write(store).responses.delete(US, "r2")
    assert await write(store).maintenance.heartbeat("process") == [ResponseKey(US, "r3")]
