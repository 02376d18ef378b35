"""Structured output always parses: 200 samples at a temperature at which free text would be noise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from syringa.engine.structured_output import masks
from syringa.engine.worker.core import EngineCore
from syringa.types import Grammar
from tests.engine.conftest import drive, request
from tests.tiers import examples

pytestmark = pytest.mark.model


def word(length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PERSON = record(name=word(12), age={"type": "integer", "minimum": 0, "maximum": 120}, email=word(20))
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    record(people={"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3}),
    {"type": "array", "items": {"enum": ["red", "green", "blue", None, 7]}, "minItems": 2, "maxItems": 8},
    record(
        at={"type": "string", "pattern": "^[0-9]{4}-[01][0-9]-[0-3][0-9]$"},
        price={"type": "integer", "minimum": -500, "maximum": 500},
        paid={"type": "boolean"},
    ),
    record(shape={"anyOf": [record(radius={"type": "integer", "maximum": 99, "minimum": 1}), record(name=word(9))]}),
    {
        "$defs": {"tag": {"type": "string", "minLength": 1, "maxLength": 8}},
        **record(tags={"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 5}, note=word(40)),
    },
]
REGEXES = [
    r"[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10}){1,2}",
    r"\+?[0-9]{2,3}(-[0-9]{3}){2}",
    r"(yes|no|maybe), because [a-z ]{5,60}\.",
    r"#[0-9a-f]{6}(, #[0-9a-f]{6}){0,4}",
]
SAMPLES = examples(20)  # per grammar


def test_samples_match_their_grammars(
    engine: Callable[..., EngineCore], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "STEP_SECONDS", 60)  # the budget has tests of its own, and this machine may be busy
    core = engine(kv_cache_tokens=200 * 256)
    ends = frozenset(core.loaded.description.end_tokens)
    grammars = [Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    grammars += [Grammar("regex", regex) for regex in REGEXES]
    prompt = list(tokenizer.encode("<|im_start|>user\nGive me an example.<|im_end|>\n<|im_start|>assistant\n").ids)
    requests = [
        request(
            str(i),
            prompt,
            seed=i,
            choices=SAMPLES,
            temperature=1.5,
            max_tokens=512,
            grammar=grammar,
            stopping={"end_tokens": ends},
        )
        for i, grammar in enumerate(grammars)
    ]
    answers = drive(core, requests)
    count = SAMPLES * len(grammars)
    assert len(answers) == count
    complete = 0
    for (id_, _), answer in answers.items():
        if answer.finish != "stop":
            assert answer.finish == "length"
            continue
        complete += 1
        text = tokenizer.decode([token for token in answer.tokens if token not in ends], skip_special_tokens=False)
        if int(id_) < len(SCHEMAS):
            jsonschema.validate(json.loads(text), SCHEMAS[int(id_)])
        else:
            assert re.fullmatch(REGEXES[int(id_) - len(SCHEMAS)], text), text
    print(f"{complete} of {count} samples finished within max_tokens, all of them valid")
    assert complete >= 0.95 * count
