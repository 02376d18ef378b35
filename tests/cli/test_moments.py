from __future__ import annotations

import pytest

from syringa.cli import moments
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
def test_moments(text: str, expected: float) -> None:
    assert moments.read(text, "--x", NOW, ahead=True) == expected


def test_spans_into_the_past() -> None:
    assert moments.read("1d", "--x", NOW, ahead=False) == NOW - 86400


@pytest.mark.parametrize("text", ["", "d", "-1d", "1 d", "1y", "tomorrow", "2023-02-30", "9" * 30 + "d", "٣d"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        moments.read(text, "--x", NOW, ahead=True)


@pytest.mark.parametrize(("text", "ahead"), [("999999999w", True), ("999999999w", False), ("0001-01-01", True)])
def test_what_is_too_far_away(text: str, ahead: bool) -> None:
    with pytest.raises(ConfigError, match="too far away"):
        moments.read(text, "--x", NOW, ahead=ahead)


def test_what_is_shown() -> None:
    assert moments.show(NOW) == "2023-11-14 22:13"
    assert moments.show(None) == ""
