from __future__ import annotations

from syringa.service.responses.history import History
from syringa.service.responses.remembered import RememberedHistories
from syringa.store import ListSize


def history(size: int) -> History:
    return History([], {}, ListSize(1, size))


def test_remembered_histories_keep_the_last_response_of_each_connection() -> None:
    remembered = RememberedHistories(100)
    remembered.put("acme", "socket", "r1", history(60))
    remembered.put("acme", "socket", "r2", history(70))
    assert remembered.get("acme", "socket").keys() == {"r2"}
    assert remembered.get("other", "socket") == {}
    remembered.forget("acme", "socket")
    remembered.forget("acme", "socket")
    assert remembered.get("acme", "socket") == {}
    assert not remembered._bytes


def test_remembered_histories_forget_the_oldest_of_the_largest_holder() -> None:
    remembered = RememberedHistories(100)
    remembered.put("small", "s", "r", history(20))
    for connection in "abc":
        remembered.put("large", connection, f"r-{connection}", history(30))
    assert [bool(remembered.get("large", each)) for each in "abc"] == [False, True, True]
    assert remembered.get("small", "s")
    remembered.put("large", "d", "r-d", history(1000))  # does not fit at all
    assert [bool(remembered.get("large", each)) for each in "bcd"] == [False, False, False]
    assert remembered.get("small", "s")
