from __future__ import annotations

from syringa.store import Store, StoredEvent
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, read, response, write


def events(*numbers: int) -> list[StoredEvent]:
    return [StoredEvent(number, f'{{"sequence_number": {number}}}') for number in numbers]


async def test_events_after_sequence_number(store: Store) -> None:
    await write(store).responses.create(response("r1", status="in_progress"))
    assert await write(store).events.append(US, "r1", events(*range(5)))
    assert await write(store).events.append(US, "r1", events(*range(5, 12)))
    assert await read(store).events.after(US, "r1") == events(*range(12))
    assert await read(store).events.after(US, "r1", 9) == events(10, 11)
    assert await read(store).events.after(US, "r1", 2, limit=3) == events(3, 4, 5)
    for number in (11, 10**30):
        assert await read(store).events.after(US, "r1", number) == []
    assert await read(store).events.after(US, "r1", -(10**30), limit=1) == events(0)


async def test_append_ignores_known_sequence_numbers(store: Store) -> None:
    await write(store).responses.create(response("r1", status="in_progress"))
    await write(store).events.append(US, "r1", events(0, 1))
    assert await write(store).events.append(US, "r1", [StoredEvent(1, "changed"), *events(2)])
    assert await write(store).events.append(US, "r1", [])
    assert await read(store).events.after(US, "r1") == events(0, 1, 2)


async def test_append_to_missing_response(store: Store, clock: Clock) -> None:
    assert not await write(store).events.append(US, "r0", events(0))
    await write(store).responses.create(response("r1", status="in_progress", expires_at=START + 5))
    await write(store).events.append(US, "r1", events(0))
    clock.now = START + 5
    assert await read(store).events.after(US, "r1") == []
    assert not await write(store).events.append(US, "r1", events(1))
