from __future__ import annotations

import csv
import io
import time
from typing import Any

import pytest

from syringa.cli.usage import NUMBERS
from syringa.service.auth.keys import create_api_key
from syringa.store import Store, UsageRecord
from tests.store.helpers import write

DAY = 86400
NOW = time.time()  # the same for all records and for the days that are expected, also around midnight


def record(days_ago: float, **changes: Any) -> UsageRecord:
    at = NOW - days_ago * DAY
    given = {"organization": "acme", "key": "k1", "model": "m", "endpoint": "/v1/completions"}
    tokens = {"input_tokens": 1000, "cached_tokens": 400, "output_tokens": 20, "reasoning_tokens": 5, "cost": 0.000001}
    return UsageRecord(at=at, **(given | tokens | {"outcome": "ok", "status": 200} | changes))


@pytest.fixture
def used(on_store: Any) -> str:
    """Store usage of two organizations over time, and return the id of a key that was used."""
    _, key = create_api_key("acme", name="laptop")

    async def fill(store: Store) -> None:
        await write(store).keys.create(key)
        await write(store).usage.add(
            [
                record(0, key=key.id),
                record(0, model="n", outcome="refused", status=429, requests=40),
                record(3, organization="other", outcome="failed", status=500, cost=1.5),
                record(40),
            ]
        )

    on_store(fill)
    return key.id


def parse(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_usage_table_with_total(syringa: Any, used: str) -> None:
    result = syringa("usage", "--by", "organization")
    assert result.status == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["organization", *(name.removesuffix("_tokens") for name in NUMBERS)]
    assert lines[1] == ["acme", "41", "1", "0", "40", "0", "2,000", "800", "40", "10", "0.000002"]
    assert lines[2] == ["other", "1", "0", "0", "0", "1", "1,000", "400", "20", "5", "1.500000"]
    assert lines[3] == ["total", "42", "1", "0", "40", "1", "3,000", "1,200", "60", "15", "1.500002"]
    assert len(lines) == 4


def test_usage_csv(syringa: Any, used: str) -> None:
    result = syringa("usage", "--by", "organization", "--csv")
    assert result.out.splitlines()[0] == (
        "organization,requests,ok,cancelled,refused,failed,"
        "input_tokens,cached_tokens,output_tokens,reasoning_tokens,cost"
    )
    assert result.out.splitlines()[1:] == [
        "acme,41,1,0,40,0,2000,800,40,10,0.000002",
        "other,1,0,0,0,1,1000,400,20,5,1.5",
    ]


def test_usage_by_day(syringa: Any, used: str) -> None:
    days = [time.strftime("%Y-%m-%d", time.gmtime(NOW - ago * DAY)) for ago in (40, 3, 0)]
    assert [each["day"] for each in parse(syringa("usage", "--csv", "--since", "all").out)] == days
    assert [each["day"] for each in parse(syringa("usage", "--csv").out)] == days[1:]
    assert [each["day"] for each in parse(syringa("usage", "--csv", "--since", "1d").out)] == days[2:]
    between = syringa("usage", "--csv", "--since", "7d", "--until", days[2])
    assert [each["day"] for each in parse(between.out)] == days[1:2]


def test_usage_by_key_shows_names(syringa: Any, used: str) -> None:
    assert f"{used} (laptop)" in syringa("usage", "--by", "key").out
    assert {each["key"] for each in parse(syringa("usage", "--by", "key", "--csv").out)} == {used, "k1"}


def test_usage_groups_and_filters(syringa: Any, used: str) -> None:
    result = parse(syringa("usage", "--by", "model,organization", "--csv").out)
    assert [(each["model"], each["organization"]) for each in result] == [("m", "acme"), ("m", "other"), ("n", "acme")]
    for option, value, expected in (("--organization", "other", 1), ("--key", used, 1), ("--model", "n", 40)):
        [total] = parse(syringa("usage", "--by", "endpoint", option, value, "--csv").out)
        assert int(total["requests"]) == expected


def test_usage_escapes_client_text(syringa: Any, on_store: Any) -> None:
    users = ("=cmd()", "\x1b[31m[red]x", 'a,"b', None)
    on_store(lambda store: write(store).usage.add([record(0, user=user) for user in users]))
    result = syringa("usage", "--by", "user")
    assert "\x1b" not in result.out
    assert "�[31m[red]x" in result.out
    assert {each["user"] for each in parse(syringa("usage", "--by", "user", "--csv").out)} == {
        "'=cmd()",
        "�[31m[red]x",
        'a,"b',
        "",
    }


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (("--by", "week"), "--by 'week': expected day, organization, key"),
        (("--by", ""), "--by ''"),
        (("--since", "yesterday"), "--since 'yesterday': expected a span"),
        (("--since", "1d", "--until", "2d"), "expected a time after --since"),
        (("--until", "99999-01-01"), "--until '99999-01-01'"),
    ],
)
def test_usage_refuses_invalid_options(error_of: Any, arguments: tuple[str, ...], result: str) -> None:
    assert result in error_of("usage", *arguments)
