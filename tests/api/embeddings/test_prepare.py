"""What is embedded for a request, and what is refused."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from syringa.api.decoding import convert
from syringa.api.embeddings import inputs
from syringa.api.embeddings.inputs import MAX_INPUTS, Truncation
from syringa.api.embeddings.prepare import PreparedEmbeddings, prepare_embeddings
from syringa.api.embeddings.request import CreateEmbeddingRequest, prepare_embedding_request
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.prompt.tokens.encoder_tokenizer import EncoderTokenizer
from syringa.types import EmbeddingResult
from tests.embedding_models import CLS, MAX_LENGTH, SEP, UNKNOWN, embedding_model, tokens_of
from tests.fake_engine import fake_model

PROMPTS = {"query": "q: ", "passage": "p: ", "other": "o: "}


async def prepare(model: ServedModel | None = None, ignored: list[str] | None = None, **body: Any) -> list[list[int]]:
    """Return the inputs of the engine for a body."""
    return (await prepared(model, ignored, **body)).request.inputs


async def prepared(
    model: ServedModel | None = None, ignored: list[str] | None = None, **body: Any
) -> PreparedEmbeddings:
    request = convert({"input": "ab"} | body, CreateEmbeddingRequest)
    names: list[str] = [] if ignored is None else ignored
    return (await prepare_embedding_request(request, FixedModels([model or embedding_model()]), names, "acme"))[0]


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the texts of each call of a tokenizer from now on."""
    encode, calls = EncoderTokenizer.encode_texts, list[list[str]]()

    def encode_texts(tokenizer: EncoderTokenizer, texts: Sequence[str]) -> list[list[int]]:
        calls.append(list(texts))
        return encode(tokenizer, texts)

    monkeypatch.setattr(EncoderTokenizer, "encode_texts", encode_texts)
    return calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [[CLS, *tokens_of("ab"), SEP]]),
        (["ab", "c"], [[CLS, *tokens_of("ab"), SEP], [CLS, *tokens_of("c"), SEP]]),
        ([5, 6.0], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (" ", [[CLS, SEP]]),
    ],
)
async def test_prepare_reads_every_form_of_input(given: Any, expected: list[list[int]]) -> None:
    assert await prepare(input=given) == expected


@pytest.mark.parametrize("given", [[5] * 100_000, [[5] * 100] * 1000], ids=["one", "many"])
async def test_prepare_checks_many_token_ids_in_a_thread(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    monkeypatch.setattr(inputs, "check_tokens", lambda *arguments: threads.add(threading.current_thread()))
    with pytest.raises(ContextLengthExceeded):
        await prepare(input=given)
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ([], "input"),
        (5, "input"),
        (["a", ""], "input[1]"),
        (["a", 5], "input[1]"),
        ([5, "a"], "input[1]"),
        ([5, -1], "input[1]"),
        ([[5], []], "input[1]"),
        ([[5], "a"], "input[1]"),
        ([5, 10**6], "input[1]"),
        ([[5, True]], "input[0][1]"),
        (["a"] * (MAX_INPUTS + 1), "input"),
        ([[5]] * (MAX_INPUTS + 1), "input"),
    ],
)
async def test_prepare_refuses_input(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepare(input=given)
    assert caught.value.param == param


async def test_prepare_accepts_as_many_inputs_as_openai() -> None:
    assert len(await prepare(embedding_model(max_request_tokens=10_000), input=["a"] * MAX_INPUTS)) == MAX_INPUTS


async def test_prepare_refuses_more_tokens_than_a_request_may_have() -> None:
    model = embedding_model(max_request_tokens=10)
    assert len(await prepare(model, input=["abc", "abc"])) == 2
    with pytest.raises(InvalidRequest, match="at most 10 tokens in one request, got 11"):
        await prepare(model, input=["abc", "abcd"])


async def test_prepare_tokenizes_long_texts_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab", "c" * 20, "d", "efg", "hij"]
    expected = await prepare(input=texts, truncate=True)
    monkeypatch.setattr(inputs, "_SLICE_CHARACTERS", 5)
    calls = record_calls(monkeypatch)
    assert await prepare(input=texts, truncate=True) == expected
    assert calls == [texts[:1], texts[1:2], texts[2:4], texts[4:]]


async def test_prepare_stops_tokenizing_at_the_first_text_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SLICE_CHARACTERS", 15)
    calls = record_calls(monkeypatch)
    with pytest.raises(ContextLengthExceeded, match=r"input\[1\] has 17\.") as caught:
        await prepare(input=["a", *["b" * 15] * 100])
    assert caught.value.param == "input[1]"
    assert calls == [["a"], ["b" * 15]]


async def test_prepare_stops_tokenizing_at_more_tokens_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_SLICE_CHARACTERS", 6)
    calls = record_calls(monkeypatch)
    with pytest.raises(InvalidRequest, match="at most 10 tokens in one request, got at least 12") as caught:
        await prepare(embedding_model(max_request_tokens=10), input=["abc"] * 100)
    assert caught.value.param == "input"
    assert calls == [["abc", "abc"]] * 2


@pytest.mark.parametrize(("given", "param"), [("a" * 15, "input"), (["a", "a" * 15], "input[1]"), ([5] * 17, "input")])
async def test_prepare_refuses_input_that_is_too_long(given: Any, param: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 16 tokens; .* has 17") as caught:
        await prepare(input=given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"truncate": True}, ["a" * 14]),
        ({"truncate": "END"}, ["a" * 14]),
        ({"truncate": "START"}, ["a" * 11 + "bcd"]),
        ({"truncate_prompt_tokens": -1}, ["a" * 14]),
        ({"truncate_prompt_tokens": 5}, ["aaa"]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ["bcd"]),
        ({"truncate_prompt_tokens": 1}, [""]),
        ({"truncate": True, "add_special_tokens": False}, ["a" * 16]),
    ],
)
async def test_prepare_cuts_input(body: dict[str, Any], expected: list[str]) -> None:
    inputs = await prepare(input=["a" * 20 + "bcd"], **body)
    assert [embedding_model().tokenizer.decode(tokens).replace("##", "") for tokens in inputs] == expected


async def test_prepare_cuts_token_ids_and_very_long_texts() -> None:
    assert await prepare(input=[[5] * 20], truncate=True) == [[5] * MAX_LENGTH]
    assert await prepare(input=["x" * 100_000], truncate=True) == [[CLS, UNKNOWN, SEP]]  # a word of over 100 letters
    with pytest.raises(ContextLengthExceeded, match="100000 characters"):
        await prepare(input=["x" * 100_000])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"truncate_prompt_tokens": 17}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "big"}, "endianness"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"normalize": False}, "normalize"),
        ({"dimensions": 2}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"input": " ", "add_special_tokens": False}, "input"),
    ],
)
async def test_prepare_refuses_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepare(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("spec", "dimensions", "expected"),
    [
        ({"matryoshka": True}, 2, 2),
        ({"matryoshka": True}, 4, None),
        ({}, 4, None),
        ({"matryoshka": True, "matryoshka_dimensions": (2, 4)}, 2, 2),
        ({"matryoshka": True, "matryoshka_dimensions": (2, 4)}, 3, InvalidRequest),
        ({"matryoshka": True, "min_dimensions": 3}, 2, InvalidRequest),
        ({"matryoshka": True}, 5, InvalidRequest),
    ],
)
async def test_prepare_shortens_vectors_of_matryoshka_models_only(
    spec: dict[str, Any], dimensions: int, expected: Any
) -> None:
    model = embedding_model(**spec)
    if expected is InvalidRequest:
        with pytest.raises(InvalidRequest, match="dimensions: expected"):
            await prepare(model, dimensions=dimensions)
    else:
        assert (await prepared(model, dimensions=dimensions)).dimensions == expected


async def test_vectors_are_shortened_and_normalized() -> None:
    result = EmbeddingResult("x", 4, struct.pack("<8f", 3, 4, 5, 6, 0, 0, 1, 1))
    short = await prepared(embedding_model(matryoshka=True), dimensions=2)
    assert [list(each) for each in short.vectors(result)] == [[0.6, 0.8], [0, 0]]
    plain = await prepared(embedding_model(normalize=False))
    assert [list(each) for each in plain.vectors(result)] == [[3, 4, 5, 6], [0, 0, 1, 1]]
    normalized = await prepared(embedding_model(normalize=False), normalize=True)
    assert [math.hypot(*each) for each in normalized.vectors(result)] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("body", "prompt", "ignored"),
    [
        ({}, "", []),
        ({"prompt_name": "other"}, "o: ", []),
        ({"input_type": "search_query"}, "q: ", []),
        ({"input_type": "document"}, "p: ", []),
        ({"input_type": "classification"}, "", ["input_type"]),
        ({"prompt_name": "other", "input_type": "query"}, "o: ", ["input_type"]),
    ],
)
async def test_prepare_puts_prompt_before_texts(body: dict[str, Any], prompt: str, ignored: list[str]) -> None:
    model, names = embedding_model(prompts=PROMPTS), list[str]()
    assert await prepare(model, names, **body) == [model.tokenizer.encode(prompt + "ab")]
    assert names == ignored


async def test_shortened_vectors_are_not_scaled_if_normalize_is_false() -> None:
    result = EmbeddingResult("x", 4, struct.pack("<8f", 3, 4, 5, 6, 0, 0, 1, 1))
    model = embedding_model(matryoshka=True, normalize=False)
    for normalize, expected in ((False, [3, 4]), (None, [0.6, 0.8]), (True, [0.6, 0.8])):
        short = await prepared(model, dimensions=2, normalize=normalize)
        assert [list(each) for each in short.vectors(result)] == [expected, [0, 0]]


async def test_prepare_uses_default_prompt_for_texts_only() -> None:
    model = embedding_model(prompts=PROMPTS, default_prompt="query")
    assert await prepare(model) == [model.tokenizer.encode("q: ab")]
    assert await prepare(model, input=[5]) == [[5]]
    with pytest.raises(InvalidRequest, match="prompt_name: a prompt is put before texts"):
        await prepare(model, input=[5], prompt_name="query")


async def test_prepare_passes_tenant_priority_and_user() -> None:
    made = await prepared(priority=3, user="me")
    assert (made.request.tenant, made.request.priority, made.user) == ("acme", 3, "me")
    assert made.tokens == 4


async def test_prepare_embeddings_of_texts_needs_only_a_model() -> None:
    made = await prepare_embeddings(["a" * 20], embedding_model(), truncation=Truncation())
    assert len(made.request.inputs[0]) == MAX_LENGTH


async def test_prepare_refuses_model_that_generates_text() -> None:
    with pytest.raises(InvalidRequest, match="'fake' generates text") as caught:
        await prepare_embedding_request(
            CreateEmbeddingRequest(input="a", model="fake"), FixedModels([fake_model()]), []
        )
    assert (caught.value.param, caught.value.code) == ("model", "wrong_model_kind")
    with pytest.raises(InvalidRequest, match="no model that makes embeddings"):
        await prepare(fake_model())
