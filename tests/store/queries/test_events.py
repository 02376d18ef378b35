from __future__ import annotations

from syringa.store import Event, Store
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, response


def events(*numbers: int) -> list[Event]:
    return [Event(number, f'{{"sequence_number": {number}}}') for number in numbers]


async def test_a_stream_goes_on_after_a_number(store: Store) -> None:
    await store.create_response(response("r1", status="in_progress"))
    assert await store.append_events(US, "r1", events(*range(5)))
    assert await store.append_events(US, "r1", events(*range(5, 12)))
    assert await store.events_after(US, "r1") == events(*range(12))
    assert await store.events_after(US, "r1", 9) == events(10, 11)
    assert await store.events_after(US, "r1", 2, limit=3) == events(3, 4, 5)
    for number in (11, 10**30):
        assert await store.events_after(US, "r1", number) == []
    assert await store.events_after(US, "r1", -(10**30), limit=1) == events(0)


async def test_a_batch_may_be_sent_again(store: Store) -> None:
    await store.create_response(response("r1", status="in_progress"))
    await store.append_events(US, "r1", events(0, 1))
    assert await store.append_events(US, "r1", [Event(1, "changed"), *events(2)])
    assert await store.append_events(US, "r1", [])
    assert await store.events_after(US, "r1") == events(0, 1, 2)


async def test_the_response_is_gone(store: Store, clock: Clock) -> None:
    assert not await store.append_events(US, "r0", events(0))
    await store.create_response(response("r1", status="in_progress", expires_at=START + 5))
    await store.append_events(US, "r1", events(0))
    clock.now = START + 5
    assert await store.events_after(US, "r1") == []
    assert not await store.append_events(US, "r1", events(1))
