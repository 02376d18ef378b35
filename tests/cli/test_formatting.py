from __future__ import annotations

import pytest

from syringa.cli.formatting import format_time, parse_time
from syringa.errors import ConfigError

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30d", NOW + 30 * 86400),
        ("12h", NOW + 12 * 3600),
        (" 2w ", NOW + 14 * 86400),
        ("90m", NOW + 5400),
        ("2023-11-15", 1_700_006_400),
        ("2023-11-15T01:00", 1_700_010_000),
        ("2023-11-15T01:00+01:00", 1_700_006_400),
    ],
)
def test_parse_time(text: str, expected: float) -> None:
    assert parse_time(text, "--x", NOW, future=True) == expected


def test_parse_time_span_into_past() -> None:
    assert parse_time("1d", "--x", NOW, future=False) == NOW - 86400


@pytest.mark.parametrize("text", ["", "d", "-1d", "1 d", "1y", "tomorrow", "2023-02-30", "9" * 30 + "d", "٣d"])
def test_parse_time_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        parse_time(text, "--x", NOW, future=True)


@pytest.mark.parametrize(("text", "future"), [("999999999w", True), ("999999999w", False), ("0001-01-01", True)])
def test_parse_time_refuses_times_out_of_range(text: str, future: bool) -> None:
    with pytest.raises(ConfigError, match="1970 to 9999"):
        parse_time(text, "--x", NOW, future=future)


def test_format_time() -> None:
    assert format_time(NOW) == "2023-11-14 22:13"
    assert format_time(None) == ""
