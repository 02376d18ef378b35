"""Chat with the official package: answers, streams and errors. It runs in the environment of that package.

python openai_chat_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import sys

import openai
from client_checks import expect_error, run_checks
from openai import AsyncOpenAI, OpenAI

URL, KEY, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
chat = client.chat.completions


def body(**fields):
    return {"model": MODEL, "messages": ASKED, "max_completion_tokens": 30, "temperature": 0, **fields}


def ask(**fields):
    return chat.create(**body(**fields))


def check_an_answer() -> None:
    answer = ask()
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert (choice.message.role, choice.message.refusal, choice.message.tool_calls) == ("assistant", None, [])
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def check_a_stream_is_the_same() -> None:
    whole = ask()
    chunks = list(ask(stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def check_usage_at_the_end_of_a_stream() -> None:
    *chunks, last = ask(stream=True, stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    counts, whole = last.usage, ask().usage
    assert (counts.prompt_tokens, counts.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)


def check_the_stream_helper() -> None:
    with chat.stream(**body(logprobs=True), stream_options={"include_usage": True}) as stream:
        seen = list(stream)
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= {event.type for event in seen}
    deltas = [event for event in seen if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == final.choices[0].message.content
    (done,) = [event.content for event in seen if event.type == "content.done"]
    assert done == ask().choices[0].message.content
    assert final.usage.completion_tokens == ask().usage.completion_tokens


def check_a_stream_that_is_left_early() -> None:
    with ask(max_completion_tokens=1000, stream=True) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            break


def check_log_probabilities() -> None:
    (choice,) = ask(logprobs=True, top_logprobs=2).choices
    tokens = choice.logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy takes the likeliest
    streamed = [chunk.choices[0].logprobs for chunk in ask(logprobs=True, top_logprobs=2, stream=True)]
    assert [token for each in streamed if each for token in each.content] == tokens
    assert all(token.top_logprobs == [] for token in ask(logprobs=True).choices[0].logprobs.content)


def check_several_choices() -> None:
    fields = {"n": 3, "seed": 3, "temperature": 1}
    whole = ask(**fields).choices
    assert [choice.index for choice in whole] == [0, 1, 2]
    assert len({choice.message.content for choice in whole}) > 1
    texts = [""] * 3
    for chunk in ask(stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole]


def check_stop_strings() -> None:
    text = ask().choices[0].message.content
    at = text.index("Paris")
    for stop in ("Paris", ["no such thing", "Paris"]):
        choice = ask(stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text[:at], "stop")
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stop=stop, stream=True)]
        assert "".join(pieces) == text[:at]


def check_seeds() -> None:
    def draw(seed):
        return ask(temperature=1.2, seed=seed).choices[0].message.content

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def check_lengths() -> None:
    for fields in ({"max_completion_tokens": 3}, {"max_completion_tokens": None, "max_tokens": 3}):
        answer = ask(**fields)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
    assert ask(max_completion_tokens=2, max_tokens=5).usage.completion_tokens == 2


def check_roles_and_parts() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "My name is Ann."}]},
        {"role": "assistant", "content": "Hello, Ann."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert ask(messages=said).choices[0].message.content


def check_the_extras() -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "chat_template_kwargs": {"thinking": False}}
    assert ask(extra_body=extra, n=2, seed=3, temperature=1).choices[1].message.content is not None
    assert ask(reasoning_effort="none", metadata={"a": "b"}).metadata == {"a": "b"}
    first = ask().choices[0].message.content
    assert ask(temperature=2, seed=1, extra_body={"top_k": 1}).choices[0].message.content == first
    assert ask(logit_bias={"7042": -100}).choices[0].message.content != first  # no " Paris"


def check_headers() -> None:
    answer = chat.with_raw_response.create(**body(extra_body={"no_such_field": 1}))
    assert answer.headers["x-syringa-ignored"] == "no_such_field"
    assert answer.headers["x-request-id"] == answer.request_id
    assert "Paris" in answer.parse().choices[0].message.content
    assert "x-syringa-ignored" not in chat.with_raw_response.create(**body()).headers
    with chat.with_streaming_response.create(**body(stream=True)) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-request-id"]


def check_the_async_client() -> None:
    async def all_at_once() -> None:
        async with AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            create = client.chat.completions.create
            answers = await asyncio.gather(*(create(**body(n=n)) for n in (1, 2, 3)))
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in await create(**body(stream=True))])
        assert {choice.message.content for answer in answers for choice in answer.choices} == {text}

    asyncio.run(all_at_once())


def check_bad_requests() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.jpg"}}
    for fields, param in [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ]:
        error = expect_error(openai.BadRequestError, ask, **fields)
        assert (error.status_code, error.type) == (400, "invalid_request_error")
        assert error.param.startswith(param), (error.param, fields)
        assert error.body["message"]
        assert error.request_id
    long = expect_error(openai.BadRequestError, ask, max_completion_tokens=100_000)
    assert (long.code, long.param) == ("context_length_exceeded", "max_completion_tokens")
    assert expect_error(openai.BadRequestError, ask, stream=True, temperature=3).param == "temperature"


def check_other_refusals() -> None:
    missing = expect_error(openai.NotFoundError, ask, model="no-such-model")
    assert (missing.code, missing.param) == ("model_not_found", "model")
    stranger = client.with_options(api_key="wrong").chat.completions
    assert expect_error(openai.AuthenticationError, stranger.create, **body()).status_code == 401


if __name__ == "__main__":
    run_checks(globals())
