from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syringa.output.harmony import HarmonyParser
from tests.output.segments import check_stage, fold, run_stage, split_points, split_text

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|>"
WEATHER = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hello.", ("", "Hello.", [])),
        ("<|channel|>final<|message|>Hello.<|return|>", ("", "Hello.", [])),
        (ANALYSIS + "<|start|>assistant<|channel|>final<|message|>Hello <b>.", ("The user asks.", "Hello <b>.", [])),
        (ANALYSIS + "<|start|>assistant" + WEATHER, ("The user asks.", "", [("get_weather", '{"city": "Köln"}')])),
        (WEATHER + "<|call|>", ("", "", [("get_weather", '{"city": "Köln"}')])),
        # The recipient may also be in the role.
        (
            ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "X"}<|call|>',
            ("", "", [("get_weather", '{"city": "X"}')]),
        ),
        (
            ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + WEATHER,
            ("The user asks.", "I look.", [("get_weather", '{"city": "Köln"}')]),
        ),
        (
            WEATHER + "<|call|><|start|>assistant" + WEATHER.replace("get_weather", "b.c-d") + "<|call|>",
            ("", "", [("get_weather", '{"city": "Köln"}'), ("b.c-d", '{"city": "Köln"}')]),
        ),
        (
            WEATHER
            + "<|call|><|start|>assistant<|channel|>final<|message|>It rains.<|end|><|start|>assistant"
            + WEATHER,
            ("", "", [("get_weather", '{"city": "Köln"}')]),
        ),
        ("<|channel|>analysis<|message|>cut sh", ("cut sh", "", [])),
        ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "", [])),
        ("<|channel|>ana", ("", "", [])),
        (WEATHER[:-5], ("", "", [("get_weather", '{"city": "K')])),
        ("Plain text, without any header.", ("", "Plain text, without any header.", [])),
        ("", ("", "", [])),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", ("a", "b", [])),
    ],
)
def test_harmony_parser_classifies_messages(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    check_stage(lambda: HarmonyParser(0), text, expected, MARKERS)


WORDS = [*MARKERS, "analysis", "final", "commentary", " to=functions.f", "a", "{}", "<"]


@given(st.data(), st.lists(st.sampled_from(WORDS), max_size=14))
def test_harmony_parser_is_independent_of_splits(data: st.DataObject, parts: list[str]) -> None:
    text = "".join(parts)
    whole = fold(run_stage(HarmonyParser(0), split_text(text), at_once=True))
    assert fold(run_stage(HarmonyParser(0), split_text(text, data.draw(split_points(text))))) == whole
    assert fold(run_stage(HarmonyParser(0), split_text(text, (), MARKERS))) == whole
