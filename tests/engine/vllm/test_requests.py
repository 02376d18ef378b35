"""Every field of a request is mapped to vLLM's terms or refused by its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syringa.engine.vllm.requests import ChoiceRequest, to_choice_requests
from syringa.errors import EngineUnavailable, InvalidRequest
from syringa.types import EngineRequest, Grammar, Image, ResumedChoice, SamplingParams, StopConditions

SCHEMA = Grammar("json_schema", '{"type": "object"}')


def request(
    sampling: dict[str, Any] | None = None, stopping: dict[str, Any] | None = None, **fields: Any
) -> EngineRequest:
    return EngineRequest(
        **{
            "id": "r",
            "prompt": [1, 2, 3],
            "sampling": SamplingParams(**{"seed": 7, **(sampling or {})}),
            "stopping": StopConditions(**{"max_tokens": 9, "end_tokens": frozenset({2}), **(stopping or {})}),
            "cache_key": b"k",
            **fields,
        }
    )


def convert(*args: Any, **fields: Any) -> list[ChoiceRequest]:
    return to_choice_requests(request(*args, **fields), {"<|im_end|>": 2})


def sampling_of(*args: Any, **fields: Any) -> dict[str, Any]:
    return convert(*args, **fields)[0].sampling


# A value of each field that is not its default. Those in `UNUSED` have no effect on vLLM.
SAMPLING: dict[str, Any] = {
    "seeded": True, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "allowed_tokens": frozenset({5}),
    "bad_words": ((5, 6),), "dry_multiplier": 1.0, "grammar": SCHEMA,
}  # fmt: skip
STOPPING: dict[str, Any] = {
    "max_tokens": 5, "min_tokens": 3, "ignore_eos": True, "end_tokens": frozenset({4}), "stop_tokens": frozenset({5}),
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "prompt": [9], "choices": 2, "logprobs": 3, "prompt_logprobs": 2, "cache_key": b"other", "use_cache": False,
    "images": (Image(data=b"", digest=b""),), "resumed": (ResumedChoice([5]),),
}  # fmt: skip
# `seed` alone, without `seeded`, was drawn by the server. DRY is refused as a whole. `opening` is a hint.
UNUSED_SAMPLING = {"seed", "dry_base", "dry_allowed_length", "dry_breakers", "opening"}
# These order or account for requests, `logprob_tokens` needs `logprobs`, and `count_only` needs images.
UNUSED_FIELDS = {
    "id", "sampling", "stopping", "tenant", "priority", "background", "waited", "fingerprint", "isolation",
    "logprob_tokens", "count_only",
}  # fmt: skip


def test_every_field_of_a_request_is_known_to_this_test() -> None:
    assert {*SAMPLING, *UNUSED_SAMPLING} == set(SamplingParams.__struct_fields__)
    assert set(STOPPING) == set(StopConditions.__struct_fields__)
    assert {*FIELDS, *UNUSED_FIELDS} == set(EngineRequest.__struct_fields__)


@pytest.mark.parametrize(
    "fields",
    [
        *({"sampling": {name: value}} for name, value in SAMPLING.items()),
        *({"stopping": {name: value}} for name, value in STOPPING.items()),
        *({name: value} for name, value in FIELDS.items()),
    ],
    ids=[*SAMPLING, *STOPPING, *FIELDS],
)
def test_every_field_is_mapped_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = convert(**fields)
    except InvalidRequest as caught:
        refusal = caught
    else:
        assert found != convert()
        return
    assert refusal.param in {*SAMPLING, "messages"}
    assert "vLLM" in refusal.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"dry_multiplier": 0.8}}, "dry_multiplier"),
        ({"images": FIELDS["images"]}, "messages"),
        ({"sampling": {"grammar": SCHEMA}, "stopping": {"min_tokens": 2}}, "min_tokens"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="The model runs on vLLM") as caught:
        convert(**fields)
    assert caught.value.param == param


def test_choices_become_requests_with_seeds_of_their_own() -> None:
    first, second = convert({"seeded": True, "seed": 2**63 - 1}, choices=2, prompt_logprobs=1)
    assert (first.choice, second.choice) == (0, 1)
    assert (first.sampling["seed"], second.sampling["seed"]) == (2**63 - 1, 0)
    assert (first.sampling["prompt_logprobs"], second.sampling["prompt_logprobs"]) == (1, None)
    assert sampling_of()["seed"] is None


def test_end_tokens_stop_unless_they_are_ignored() -> None:
    assert sampling_of(stopping={"stop_tokens": frozenset({8})})["stop_token_ids"] == [2, 8]
    ignoring = sampling_of(stopping={"stop_tokens": frozenset({8}), "ignore_eos": True})
    assert (ignoring["stop_token_ids"], ignoring["ignore_eos"]) == ([8], True)
    assert sampling_of(stopping={"end_tokens": frozenset()})["ignore_eos"]  # as in a step of a beam search


def test_grammar_ends_output_although_end_tokens_are_ignored() -> None:
    assert sampling_of({"grammar": SCHEMA}, {"ignore_eos": True})["ignore_eos"] is False


def test_request_without_output_generates_one_token() -> None:
    assert sampling_of(stopping={"max_tokens": 0, "min_tokens": 0})["max_tokens"] == 1


def test_alternatives_are_the_given_tokens() -> None:
    found = sampling_of(logprobs=9, logprob_tokens=(5, 6))
    assert (found["logprobs"], found["logprob_token_ids"]) == (2, [5, 6])


def test_prefix_cache_is_separated_by_key_and_avoided_on_request() -> None:
    assert convert()[0].cache_salt == convert()[0].cache_salt != convert(cache_key=b"other")[0].cache_salt
    assert convert(use_cache=False)[0].cache_salt != convert(use_cache=False)[0].cache_salt
    first, second = convert(use_cache=False, choices=2)
    assert first.cache_salt == second.cache_salt  # the choices of a request share their prompt


# Resume


def resumed(*args: Any, **fields: Any) -> list[ChoiceRequest]:
    return convert(
        *args, choices=3, resumed=(ResumedChoice([5, 6]), ResumedChoice([], True), ResumedChoice()), **fields
    )


def test_resumed_choices_continue_their_tokens() -> None:
    first, third = resumed()
    assert (first.choice, first.prompt, first.sampling["max_tokens"]) == (0, [1, 2, 3, 5, 6], 7)
    assert (third.choice, third.prompt, third.sampling["max_tokens"]) == (2, [1, 2, 3], 9)


@pytest.mark.parametrize(
    ("sampling", "stopping", "name"),
    [
        ({"seeded": True}, {}, "`seed`"),
        ({"frequency_penalty": 0.1}, {}, "`frequency_penalty`"),
        ({"presence_penalty": 0.1}, {}, "`presence_penalty`"),
        ({"repetition_penalty": 1.1}, {}, "`repetition_penalty`"),
        ({"grammar": SCHEMA}, {}, "a grammar, schema or tools"),
        ({"bad_words": ((5, 6),)}, {}, "`bad_words`"),
        ({}, {"min_tokens": 4}, "`min_tokens`"),
        ({"seeded": True, "presence_penalty": 0.1}, {}, "`seed`, `presence_penalty`"),
    ],
)
def test_request_that_would_continue_differently_is_not_resumed(
    sampling: dict[str, Any], stopping: dict[str, Any], name: str
) -> None:
    with pytest.raises(EngineUnavailable, match=f"cannot continue a request with {name} elsewhere"):
        resumed(sampling, stopping)


def test_request_is_resumed_where_the_field_makes_no_difference() -> None:
    assert resumed({"seeded": True, "temperature": 0.0, "bad_words": ((5,),)})
    nothing_yet = tuple(msgspec.structs.replace(each, tokens=[]) for each in (ResumedChoice(), ResumedChoice([], True)))
    assert convert({"seeded": True}, choices=2, resumed=nothing_yet)
