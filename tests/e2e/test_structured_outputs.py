"""The constraints of vLLM and llama.cpp on the real model, at a temperature at which it writes anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import KEY
from tests.e2e.server import Server

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
PERSON_JSON = r'\{"name":"([^"\\]|\\.)*","age":[0-9]{1,2}\}'
GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c]{2} | root'
LARK = 'start: "[" item ("," item)* "]"\nitem: /[a-c]{2}/ | start'
NESTED = r"[\[\],a-c]+"
PHONE = "[0-9]{3}-[0-9]{4}"
CITIES = ["Paris", "Rome", "Oslo"]
TAGGED = r"<n>[0-9]{1,3}</n>"
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


FIELDS: list[tuple[dict[str, Any], str]] = [
    (outputs(json=PERSON), PERSON_JSON),
    (outputs(regex=PHONE), PHONE),
    (outputs(choice=CITIES), "|".join(CITIES)),
    (outputs(grammar=GBNF), NESTED),
    (outputs(json_object=True), r"\{[\s\S]*\}"),
    (
        outputs(
            structural_tag={
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<n>",
                    "content": {"type": "json_schema", "json_schema": NUMBER},
                    "end": "</n>",
                },
            }
        ),
        TAGGED,
    ),
    ({"guided_json": PERSON}, PERSON_JSON),
    ({"guided_regex": PHONE}, PHONE),
    ({"guided_choice": CITIES}, "|".join(CITIES)),
    ({"guided_grammar": LARK}, NESTED),
    ({"grammar": GBNF}, NESTED),
    ({"json_schema": PERSON}, PERSON_JSON),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, PERSON_JSON),
]


@pytest.fixture(scope="module")
def http(shared_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as http:
        yield http


def chat(http: httpx.Client, body: dict[str, Any], question: str = "Tell me a story.") -> dict[str, Any]:
    """Return the first choice."""
    messages = [{"role": "user", "content": question}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "seed": 3, "max_tokens": 40, **body})
    assert answer.status_code == 200, answer.text
    assert "x-syringa-ignored" not in answer.headers
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize(("body", "pattern"), FIELDS, ids=lambda value: str(value)[:50])
def test_model_writes_what_the_field_allows(http: httpx.Client, body: dict[str, Any], pattern: str) -> None:
    choice = chat(http, body)
    text = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, text), text
    else:  # nesting and objects may go on to the limit
        assert pattern in (NESTED, r"\{[\s\S]*\}")
        assert re.match(r"\[|\{", text), text


def test_completion_and_response_are_constrained(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 20, **outputs(choice=CITIES)})
    assert answer.json()["choices"][0]["text"] in CITIES
    answer = http.post("/v1/responses", json={"input": "Tell me a story.", **outputs(choice=CITIES)})
    assert answer.json()["output"][0]["content"][0]["text"] in CITIES


def test_model_writes_whitespace_that_the_pattern_allows(http: httpx.Client) -> None:
    """It likes to write a space after a colon, and does so where it may."""
    schema = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}
    body = {"temperature": 0, "max_tokens": 120}
    question = "List two people with name and age as JSON."
    compact = chat(http, body | outputs(json=schema, disable_any_whitespace=True), question)["message"]["content"]
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"), ensure_ascii=False)
    for fields in (
        outputs(json=schema, whitespace_pattern=" ?"),
        {"guided_json": schema, "guided_whitespace_pattern": " ?"},
    ):
        spaced = chat(http, body | fields, question)["message"]["content"]
        assert json.loads(spaced)
        assert re.search(r'[:,] ["0-9{]', spaced), spaced
        assert not re.search(r"[:,\[{]\s\s|\n", spaced), spaced


def test_model_adds_properties_only_where_it_may(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    question = "Describe a person as JSON with name, age, city and job."
    body = {"temperature": 0, "max_tokens": 120}
    closed = chat(http, body | outputs(json=schema, disable_additional_properties=True), question)
    assert list(json.loads(closed["message"]["content"])) == ["name"]
    opened = chat(http, body | outputs(json=schema, disable_additional_properties=False), question)
    assert re.match(r'\{"name":"[^"]*","', opened["message"]["content"]), opened


def test_model_writes_free_text_around_structural_tags(http: httpx.Client) -> None:
    """In vLLM's older form: the text is free, and a number follows each trigger."""
    structure = {"begin": "<b>", "schema": NUMBER, "end": "</b>"}
    body = {"prompt": "1: <b>one</b>\n2: <b>two</b>\n3: <b>three</b>\n4:", "max_tokens": 40, "temperature": 0}
    free = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert re.search(r"<b>[a-z]", free), free
    tag = {"response_format": {"type": "structural_tag", "structures": [structure], "triggers": ["<b>"]}}
    text = http.post("/v1/completions", json=body | tag).json()["choices"][0]["text"]
    assert re.search(r"<b>[0-9]{1,3}</b>[^<]", text), text
    assert "<b>" not in re.sub(r"<b>[0-9]{0,3}(</b>|<?/?b?$)", "", text), text
