from __future__ import annotations

from syringa.errors import Unauthorized
from syringa.service.auth.key_watch import KeyWatch
from syringa.service.auth.keys import Caller


def test_key_watch_cancels_what_runs_with_an_invalid_key() -> None:
    valid, revoked = Caller(key="valid"), Caller(key="revoked")
    error = Unauthorized("revoked")
    watch = KeyWatch(lambda caller: error if caller is revoked else None)
    cancelled: dict[str, list[Exception]] = {"valid": [], "revoked": [], "ended": []}
    with watch.watching(revoked, cancelled["ended"].append):
        pass
    with watch.watching(valid, cancelled["valid"].append), watch.watching(revoked, cancelled["revoked"].append):
        watch.cancel_invalid()
    assert cancelled == {"valid": [], "revoked": [error], "ended": []}
