from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.service.auth.keys import LAST_MOMENT, RateLimits, check_limit, check_organization, digest, draw, mint


def test_keys_are_drawn_at_random() -> None:
    keys = [draw() for _ in range(200)]
    assert len(set(keys)) == 200
    assert all(re.fullmatch(r"sk-syr-[A-Za-z0-9]{43}", key) for key in keys)
    assert len(set("".join(key[7:] for key in keys))) == 62


def test_what_is_kept_of_a_key() -> None:
    key, kept = mint("acme", name="laptop", models=["b", "a", "b"], expires_at=2000, now=1000.9)
    assert kept.digest == digest(key) == digest(key.encode()) == hashlib.sha256(key.encode()).hexdigest()
    assert re.fullmatch(r"key_[0-9a-f]{16}", kept.id)
    assert (kept.organization, kept.name, kept.models, kept.admin) == ("acme", "laptop", ("a", "b"), False)
    assert (kept.created_at, kept.expires_at, kept.revoked_at, kept.last_used_at) == (1000, 2000, None, None)
    assert key.startswith(kept.hint)
    assert len(kept.hint) == len("sk-syr-") + 4
    assert key not in repr(kept)


def test_limits_of_a_key() -> None:
    _, kept = mint("acme", rates=RateLimits(tokens_per_minute=5), admin=True, models=[])
    assert (kept.requests_per_minute, kept.tokens_per_minute, kept.concurrent) == (None, 5, None)
    assert (kept.admin, kept.models) == (True, ())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"organization": "a b"}, "organization"),
        ({"name": "n" * 101}, "name"),
        ({"name": "a\x1b[31m"}, "name"),
        ({"models": [""]}, "models"),
        ({"models": ["a\n"]}, "models"),
        ({"models": ["a" * 257]}, "models"),
        ({"expires_at": 1000}, "expires_at"),
        ({"expires_at": LAST_MOMENT + 1}, "expires_at"),
        ({"rates": RateLimits(concurrent=-1)}, "concurrent"),
        ({"rates": RateLimits(tokens_per_minute=10**12 + 1)}, "tokens_per_minute"),
    ],
)
def test_keys_that_cannot_be(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failed:
        mint(**({"organization": "acme", "now": 1000.0} | changes))
    assert failed.value.param == param


@pytest.mark.parametrize("id", ["a", "A.b_c-9", "x" * 64])
def test_what_organizations_are_called(id: str) -> None:
    check_organization(id)


@pytest.mark.parametrize("id", ["", "x" * 65, "a b", "a/b", "ä", "a\n", "٣", "a\0"])
def test_what_they_are_not_called(id: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 64 characters"):
        check_organization(id)


def test_limits() -> None:
    for limit in (None, 0, 10**12):
        check_limit("concurrent", limit)
    with pytest.raises(InvalidRequest, match="concurrent: expected a whole number from 0"):
        check_limit("concurrent", -1)
