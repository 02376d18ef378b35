"""The checks of `test_openai_python.py`. It runs in the environment of that package.

python openai_client.py URL KEY MODEL: run every check below, and print a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import traceback

import openai
from openai import OpenAI

URL, KEY, MODEL = sys.argv[1:]
PROMPT = "The capital of France is"
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
create = client.completions.create


def greedy(**fields):
    return create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields})


def expect_error(kind, call=greedy, *arguments, **fields):
    try:
        call(*arguments, **fields)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {arguments} {fields}")


def check_a_completion():
    answer = greedy()
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    (choice,) = answer.choices
    assert "Paris" in choice.text
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (12, 5)
    assert answer.usage.total_tokens == 17
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def check_a_stream_is_the_same():
    whole = greedy().choices[0]
    chunks = list(greedy(stream=True))
    assert len(chunks) > 6
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def check_usage_at_the_end_of_a_stream():
    *chunks, last = greedy(stream=True, stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (5, 12, 17)


def check_several_prompts_and_choices():
    body = {"prompt": [PROMPT, "Once upon a time"], "n": 3, "temperature": 1, "seed": 11}
    whole = greedy(**body)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) > 3
    texts = [""] * 6
    for chunk in greedy(stream=True, **body):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def check_token_ids():
    tokens = [504, 3575, 282, 4649, 314]  # PROMPT, in SmolLM2's vocabulary
    assert greedy(prompt=tokens).choices[0].text == greedy().choices[0].text
    assert greedy(prompt=[tokens, tokens]).choices[1].text == greedy().choices[0].text


def check_log_probabilities():
    logprobs = greedy(logprobs=3).choices[0].logprobs
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(each) for each in lists] == [12] * 4
    assert logprobs.text_offset[0] == 0
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value <= 0
        assert len(top) == 3
        assert top[token] == value == max(top.values())
    streamed = [chunk.choices[0].logprobs for chunk in greedy(logprobs=3, stream=True)]
    assert [token for each in streamed for token in each.tokens] == logprobs.tokens
    assert [value for each in streamed for value in each.token_logprobs] == logprobs.token_logprobs


def check_echo():
    choice = greedy(echo=True, logprobs=0).choices[0]
    assert choice.text == PROMPT + greedy().choices[0].text
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == 5 + 12
    scored = greedy(echo=True, logprobs=0, max_tokens=0)
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:5]
    assert scored.usage.completion_tokens == 0


def check_stop_strings():
    text = greedy(max_tokens=24).choices[0].text
    for stop in (text[8:11], [text[8:11], "no such thing"]):
        choice = greedy(max_tokens=24, stop=stop).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.text == text[: text.index(text[8:11])]
        pieces = [chunk.choices[0].text for chunk in greedy(max_tokens=24, stop=stop, stream=True)]
        assert "".join(pieces) == choice.text


def check_seeds():
    def draw(seed):
        return greedy(temperature=1.2, seed=seed, max_tokens=24).choices[0].text

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def check_suffix_best_of_penalties_bias():
    assert greedy(suffix=" The end.").choices[0].text.endswith(" The end.")
    best = greedy(best_of=3, n=2, temperature=1, seed=3, extra_body={"ignore_eos": True})
    assert (len(best.choices), best.usage.completion_tokens) == (2, 36)
    assert greedy(logit_bias={"7042": -100}).choices[0].text != greedy().choices[0].text  # no " Paris"
    assert greedy(frequency_penalty=2, presence_penalty=2, max_tokens=40, user="a-user").choices[0].text


def check_fields_of_ours():
    first = greedy().choices[0].text
    assert greedy(temperature=2, seed=1, extra_body={"top_k": 1}).choices[0].text == first
    assert greedy(temperature=2, seed=1, extra_body={"min_p": 1.0}).choices[0].text == first
    grammar = {"type": "regex", "value": " [0-9]{4}-[0-9]{2}"}
    dated = greedy(temperature=1, seed=2, extra_body={"grammar": grammar}).choices[0]
    assert [len(part) for part in dated.text.strip().split("-")] == [4, 2]
    assert dated.finish_reason == "stop"
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    grammar = {"type": "json_schema", "value": schema | {"additionalProperties": False}}
    person = greedy(max_tokens=60, extra_body={"grammar": grammar, "repetition_penalty": 1.1}).choices[0].text
    assert type(json.loads(person)["age"]) is int
    loop = {"prompt": "one two three one two three one two three one two", "max_tokens": 16}
    dry = {"dry_multiplier": 5, "dry_base": 2, "dry_allowed_length": 2, "dry_sequence_breakers": ["\n"]}
    assert " three one two three" in greedy(**loop).choices[0].text
    assert " three one two three" not in greedy(**loop, extra_body=dry).choices[0].text


def check_unknown_fields_are_named():
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, extra_body={"no_such_field": 1}
    )
    assert answer.headers["x-syringa-ignored"] == "no_such_field"
    assert answer.parse().choices[0].text


def check_bad_requests():
    for fields, param in [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"extra_body": {"grammar": {"type": "regex", "value": "("}}}, "grammar.value"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
    ]:
        error = expect_error(openai.BadRequestError, **fields)
        assert error.status_code == 400
        assert error.param.startswith(param), (error.param, fields)
        assert error.type == "invalid_request_error"
        assert error.body["message"]
    assert expect_error(openai.BadRequestError, max_tokens=10**6).code == "context_length_exceeded"
    assert expect_error(openai.BadRequestError, stream=True, temperature=3).param == "temperature"


def check_an_unknown_model():
    error = expect_error(openai.NotFoundError, model="no-such-model")
    assert (error.code, error.param) == ("model_not_found", "model")
    assert MODEL in error.message
    assert expect_error(openai.NotFoundError, client.models.retrieve, "no-such-model").code == "model_not_found"


def check_keys():
    for key in ("wrong", "-"):
        stranger = client.with_options(api_key=key)
        assert expect_error(openai.AuthenticationError, stranger.models.list).status_code == 401
        assert (
            expect_error(openai.AuthenticationError, stranger.completions.create, model=MODEL, prompt="x").status_code
            == 401
        )


def check_models():
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")
    assert model.created > 1.7e9
    assert model.owned_by


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                error = None
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"name": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
