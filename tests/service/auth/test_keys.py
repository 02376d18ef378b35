from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.service.auth.keys import (
    MAX_TIMESTAMP,
    RateLimits,
    check_limit,
    check_organization,
    create_api_key,
    digest,
    generate_key,
)


def test_generated_keys_are_random() -> None:
    keys = [generate_key() for _ in range(200)]
    assert len(set(keys)) == 200
    assert all(re.fullmatch(r"sk-syr-[A-Za-z0-9]{43}", key) for key in keys)
    assert len(set("".join(key[7:] for key in keys))) == 62


def test_stored_record_has_digest_but_not_key() -> None:
    key, stored = create_api_key("acme", name="laptop", models=["b", "a", "b"], expires_at=2000, now=1000.9)
    assert stored.digest == digest(key) == digest(key.encode()) == hashlib.sha256(key.encode()).hexdigest()
    assert re.fullmatch(r"key_[0-9a-f]{16}", stored.id)
    assert (stored.organization, stored.name, stored.models, stored.admin) == ("acme", "laptop", ("a", "b"), False)
    assert (stored.created_at, stored.expires_at, stored.revoked_at, stored.last_used_at) == (1000, 2000, None, None)
    assert key.startswith(stored.hint)
    assert len(stored.hint) == len("sk-syr-") + 4
    assert key not in repr(stored)


def test_limits_of_key_are_stored() -> None:
    _, stored = create_api_key("acme", rates=RateLimits(tokens_per_minute=5), admin=True, models=[])
    assert (stored.requests_per_minute, stored.tokens_per_minute, stored.concurrent) == (None, 5, None)
    assert (stored.admin, stored.models) == (True, ())


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
        ({"expires_at": MAX_TIMESTAMP + 1}, "expires_at"),
        ({"rates": RateLimits(concurrent=-1)}, "concurrent"),
        ({"rates": RateLimits(tokens_per_minute=10**12 + 1)}, "tokens_per_minute"),
    ],
)
def test_create_api_key_refuses_invalid_values(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failed:
        create_api_key(**({"organization": "acme", "now": 1000.0} | changes))
    assert failed.value.param == param


@pytest.mark.parametrize("id", ["a", "A.b_c-9", "x" * 64])
def test_valid_organization_ids(id: str) -> None:
    check_organization(id)


@pytest.mark.parametrize("id", ["", "x" * 65, "a b", "a/b", "ä", "a\n", "٣", "a\0"])
def test_invalid_organization_ids(id: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 64 characters"):
        check_organization(id)


def test_check_limit() -> None:
    for limit in (None, 0, 10**12):
        check_limit("concurrent", limit)
    with pytest.raises(InvalidRequest, match="concurrent: expected a whole number from 0"):
        check_limit("concurrent", -1)
