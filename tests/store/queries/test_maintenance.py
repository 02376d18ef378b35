from __future__ import annotations

import json

from syringa.store import Event, Running, Store
from syringa.store.store import LOST
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, conversation, items, response, statements


async def test_expiry_in_chunks(store: Store) -> None:
    for n in range(45):
        kept = response(f"r{n}", organisation=f"o{n % 3}", expires_at=START + n, output=tuple(items("o")))
        await store.create_response(kept, items("i"))
        await store.append_events(f"o{n % 3}", f"r{n}", [Event(0, "{}")])
    await store.create_response(response("stays"), items("i"))
    await store.create_conversation(conversation("c1", expires_at=START + 3), items("a"))
    await store.create_conversation(conversation("c2"), items("b"))
    with statements(store) as seen:
        assert await store.expire(START + 42) == 43 + 1
    assert sum(each.startswith("DELETE FROM responses") for each in seen) == 3
    assert await store.expire(START + 42) == 0
    assert await store.get_response("o0", "r42") is None
    assert await store.get_response("o1", "r43") is not None
    assert await store.get_response(US, "stays") is not None
    assert await store.get_conversation(US, "c1") is None
    assert await store.get_conversation(US, "c2") is not None
    assert await store.find_items(US, ["a", "b", "i"]) == {each.id: each for each in items("b", "i")}


async def test_expire_goes_by_the_clock(store: Store, clock: Clock) -> None:
    await store.create_response(response("r1", expires_at=START + 5))
    assert await store.expire() == 0
    clock.now = START + 5
    assert await store.expire() == 1


async def test_what_a_silent_process_ran_has_failed(store: Store, clock: Clock) -> None:
    await store.create_response(response("r1", status="in_progress", owner="gone"), items("i1"))
    await store.create_response(response("r2", organisation="other", status="queued", owner="alive"))
    await store.create_response(response("r3"))
    clock.now += 20
    assert await store.heartbeat("alive") == [Running("other", "r2")]
    clock.now += 20
    assert await store.fail_orphans(silent_for=60) == []
    assert await store.fail_orphans(silent_for=30) == [Running(US, "r1")]
    assert await store.fail_orphans(silent_for=30) == []
    failed = await store.get_response(US, "r1")
    assert failed is not None
    assert (failed.status, failed.owner) == ("failed", None)
    body = json.loads(failed.body)
    assert body["status"] == "failed"
    assert body["error"] == {"code": "server_error", "message": LOST}
    assert body["metadata"] == {"ä": "\0"}
    alive = await store.get_response("other", "r2")
    assert alive is not None
    assert alive.status == "queued"
    assert await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1")) == "failed"


async def test_what_a_dead_process_ran_has_failed(store: Store) -> None:
    for n in range(30):
        await store.create_response(response(f"r{n}", status="queued", owner="dead"))
    await store.create_response(response("mine", status="in_progress", owner="alive"))
    failed = await store.fail_orphans(gone=lambda owner: owner == "dead", message="The server was restarted.")
    assert len(failed) == 30
    assert await store.heartbeat("dead") == []
    assert await store.heartbeat("alive") == [Running(US, "mine")]
    lost = await store.get_response(US, "r7")
    assert lost is not None
    assert json.loads(lost.body)["error"]["message"] == "The server was restarted."


async def test_the_heartbeat_tells_what_was_cancelled(store: Store) -> None:
    for id in ("r1", "r2", "r3"):
        await store.create_response(response(id, status="in_progress"))
    await store.finish_response(US, "r1", status="cancelled", body="{}")
    await store.delete_response(US, "r2")
    assert await store.heartbeat("process") == [Running(US, "r3")]
