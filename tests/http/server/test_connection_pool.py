from __future__ import annotations

import pytest

from syringa.errors import EngineOverloaded
from syringa.http.server import connection_pool
from syringa.http.server.connection_pool import ConnectionPool


class FakeConnection:
    """A connection that is kept open after a complete request, unless it is `fresh`."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.idle, self.evicted = not fresh, False

    def evict(self) -> None:
        self.evicted = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> ConnectionPool:
    return ConnectionPool(4, clock)


def connect(pool: ConnectionPool, organization: str | None = None, *, busy: bool = False) -> FakeConnection:
    """Open a connection and send a request of an organization, whose response has ended unless it is `busy`."""
    connection = FakeConnection(fresh=True)
    assert pool.add(connection)
    pool.begin(connection)
    pool.claim(connection, organization)
    connection.idle = not busy
    if not busy:
        pool.end(connection)
    return connection


def evicted(*connections: FakeConnection) -> list[bool]:
    return [connection.evicted for connection in connections]


def test_pool_evicts_the_idlest_connection_of_the_largest_holder(pool: ConnectionPool) -> None:
    small = connect(pool, "small")
    first, second, third = (connect(pool, "large") for _ in range(3))
    pool.begin(first)  # another request: now the second has been idle for longest
    pool.end(first)
    newcomer = connect(pool, "new")
    assert evicted(small, first, second, third, newcomer) == [False, False, True, False, False]


def test_pool_spares_busy_connections_while_another_is_idle(pool: ConnectionPool) -> None:
    busy = [connect(pool, "large", busy=True) for _ in range(2)]
    idle = [connect(pool, "other") for _ in range(2)]
    assert not connect(pool, "new", busy=True).evicted
    assert evicted(*busy) == [False, False]
    assert sorted(evicted(*idle)) == [False, True]


def test_pool_makes_room_for_a_smaller_organization_among_busy_connections(pool: ConnectionPool) -> None:
    large = [connect(pool, "large", busy=True) for _ in range(4)]
    new = [connect(pool, "new", busy=True) for _ in range(2)]
    assert evicted(*large) == [False, False, True, True]  # those whose responses began last
    third = FakeConnection(fresh=True)
    pool.add(third)
    with pytest.raises(EngineOverloaded):  # two each: nobody holds more
        pool.claim(third, "new")
    assert evicted(*large, *new) == [False, False, True, True, False, False]


def test_pool_refuses_the_largest_holder_and_leaves_others_alone(clock: Clock) -> None:
    pool = ConnectionPool(5, clock)
    other = [connect(pool, "other") for _ in range(2)]
    large = [connect(pool, "large", busy=True) for _ in range(3)]
    newcomer = FakeConnection(fresh=True)
    assert pool.add(newcomer)
    with pytest.raises(EngineOverloaded):
        pool.claim(newcomer, "large")
    assert not any(evicted(*other, *large))


def test_pool_evicts_nothing_busy_for_a_client_without_a_key(pool: ConnectionPool) -> None:
    busy = [connect(pool, "large", busy=True) for _ in range(4)]
    newcomer = FakeConnection(fresh=True)
    assert pool.add(newcomer)
    with pytest.raises(EngineOverloaded):
        pool.claim(newcomer, None)
    assert not any(evicted(*busy))


def test_pool_evicts_idle_connections_without_a_key_first(pool: ConnectionPool) -> None:
    large = [connect(pool, "large") for _ in range(3)]
    public = connect(pool, None)
    assert not connect(pool, "large").evicted
    assert evicted(*large, public) == [False, False, False, True]


def test_pool_gives_new_connections_time_to_send_a_request(pool: ConnectionPool, clock: Clock) -> None:
    silent = [FakeConnection(fresh=True) for _ in range(5)]
    assert all(pool.add(each) for each in silent)
    assert not any(evicted(*silent))
    assert pool.is_over(silent[4])
    clock.now += connection_pool.PATIENCE_SECONDS + 0.1
    sixth = FakeConnection(fresh=True)
    assert pool.add(sixth)
    assert evicted(*silent) == [True, False, False, False, False]


def test_pool_closes_connections_far_above_the_limit(pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "OVERFLOW_CONNECTIONS", 2)
    accepted = [pool.add(FakeConnection(fresh=True)) for _ in range(8)]
    assert accepted == [True] * 6 + [False] * 2


def test_pool_finds_a_place_that_became_free(pool: ConnectionPool) -> None:
    busy = [connect(pool, "large", busy=True) for _ in range(4)]
    newcomer = FakeConnection(fresh=True)
    pool.add(newcomer)
    pool.remove(busy[0])
    pool.claim(newcomer, None)
    assert not pool.is_over(newcomer)
    assert not any(evicted(*busy))


def test_pool_ignores_evicted_connections(pool: ConnectionPool) -> None:
    large = [connect(pool, "large") for _ in range(4)]
    connect(pool, "new")
    assert large[0].evicted
    pool.begin(large[0])
    pool.end(large[0])
    pool.claim(large[0], "large")
    pool.replace(large[0], FakeConnection())
    pool.remove(large[0])
    connect(pool, "new")
    assert evicted(*large) == [True, True, False, False]


def test_pool_gives_the_place_of_an_upgraded_connection_to_the_new_protocol(pool: ConnectionPool) -> None:
    busy = [connect(pool, "large", busy=True) for _ in range(4)]
    http, websocket = FakeConnection(fresh=True), FakeConnection(fresh=True)
    pool.add(http)
    pool.replace(http, websocket)
    assert (pool.is_over(http), pool.is_over(websocket)) == (False, True)
    pool.claim(websocket, "new")
    assert evicted(*busy) == [False, False, False, True]
