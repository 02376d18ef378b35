from __future__ import annotations

import math
from typing import Any

import pytest

from syringa.api.ollama.common import (
    check_template,
    find_model,
    new_model_id,
    parse_keep_alive,
    rename_error,
    renamed,
    shown_name,
    timestamp,
)
from syringa.errors import InvalidRequest, NotFound


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("0", 0.0),
        ("0s", 0.0),
        (300, 300.0),
        (2.5, 2.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        (-1, math.inf),
        ("-1m", math.inf),
        ("-1", math.inf),
        (10**400, math.inf),
        (-(10**400), math.inf),
        (1e300, 1e300),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(given: Any, seconds: float | None) -> None:
    assert parse_keep_alive(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "soon", "5 m", "m", "5x", True, [], {}, "1h-2m", "٣m", "1" * 65, "1" * 1_000_000 + "x"]
)
def test_keep_alive_refuses_what_is_no_duration(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        parse_keep_alive(given)


def test_names_in_lists_have_a_tag() -> None:
    for id, shown in [("mario", "mario:latest"), ("hf.co/a/b:Q4_0", "hf.co/a/b:Q4_0"), ("a:1/b", "a:1/b:latest")]:
        assert shown_name(id) == shown


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("mario", "mario"),
        ("mario:latest", "mario"),
        ("Mario_2.5-x:7b", "Mario_2.5-x:7b"),
        ("hf.co/a/b:Q4_0", "hf.co/a/b:Q4_0"),
        ("https://hf.co/a/b", "hf.co/a/b"),
    ],
)
def test_new_model_has_the_id_of_its_name(name: str, id: str) -> None:
    assert new_model_id(name) == id


@pytest.mark.parametrize(
    "name",
    [
        *("", ":latest", "a:", ":7b", "a b", "a\0", "a\n", "é", "a:b:c", "a/", "/a", "a//b", "-a", "a*", "https://"),
        *("../x", "a/../b", "..", "a..b", "./a", "a/.b", "/etc/passwd", "~root/x", "C:\\x", "a" * 201, "a/" * 100_000),
    ],
)
def test_name_of_a_new_model_is_no_path(name: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid model name"):
        new_model_id(name)


async def test_model_is_found_with_and_without_its_tag() -> None:
    known = {"mario": 1, "luigi:latest": 2, "peach:7b": 3, "": 4}

    async def find(id: str) -> int:
        if id not in known:
            raise NotFound("unknown")
        return known[id]

    for name, value in {"mario": 1, "mario:latest": 1, "luigi": 2, "luigi:latest": 2, "peach:7b": 3}.items():
        assert await find_model(find, name) == value
    for name in ("peach", "peach:latest", "mario:7b", ":latest"):
        with pytest.raises(NotFound, match=f"model '{name}' not found"):
            await find_model(find, name)


def test_timestamp_is_rfc_3339_in_utc() -> None:
    assert timestamp(0.25) == "1970-01-01T00:00:00.250000Z"
    assert timestamp().endswith("Z")


@pytest.mark.parametrize(
    "source",
    [
        "{{ .System }}",
        "{{- if .System }}<|im_start|>{{ end }}",
        "{{ range .Messages }}x{{ end }}",
        "{{ $last := 1 }}",
        "{{ .Prompt }} {{ .Response }}",
    ],
)
def test_go_template_is_refused_by_name(source: str) -> None:
    with pytest.raises(InvalidRequest, match="Go template"):
        check_template(source)


def test_jinja_template_is_accepted() -> None:
    check_template("{% for m in messages %}{{ m.role }}{{ m['content'] }}{% if loop.last %}{{ bos_token }}{% endif %}")


def test_fields_of_other_apis_have_their_own_names_in_errors_and_lists() -> None:
    assert list(renamed(["json_schema.properties.a", "stop[1]", "stopping", "options.x"])) == [
        "format.properties.a",
        "options.stop[1]",
        "stopping",
        "options.x",
    ]
    error = InvalidRequest("json_schema.type: unknown.", param="json_schema.type")
    rename_error(error)
    assert (error.message, error.param) == ("format.type: unknown.", "format.type")
