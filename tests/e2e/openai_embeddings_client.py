"""Embeddings by the official `openai` package. It runs in the environment of that package.

python openai_embeddings_client.py URL KEY MODEL
"""

from __future__ import annotations

import array
import asyncio
import base64
import json
import math
import sys
import time

import openai
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
TEXTS = ["Lilacs bloom in May.", "In May, the lilac is in flower.", "The train to Hamburg is late."]


def similarity(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def check_similar_texts_have_similar_vectors():
    answer = CLIENT.embeddings.create(model=MODEL, input=TEXTS)
    first, second, other = [each.embedding for each in answer.data]
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert len(first) == 384
    assert math.isclose(math.hypot(*first), 1, abs_tol=1e-3)
    assert similarity(first, second) > 0.7 > 0.3 > similarity(first, other)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20


def check_floats_are_those_of_base64():
    """The package asks for base64 unless told otherwise, and decodes it."""
    decoded = CLIENT.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding
    floats = CLIENT.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float").data[0].embedding
    assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(decoded, floats, strict=True))


def check_token_ids_are_embedded_as_their_text():
    tokens = CLIENT.post("../tokenize", cast_to=object, body={"model": MODEL, "prompt": TEXTS[0]})["tokens"]
    by_tokens = CLIENT.embeddings.create(model=MODEL, input=tokens).data[0].embedding
    by_text = CLIENT.embeddings.create(model=MODEL, input=[TEXTS[0]]).data[0].embedding
    assert similarity(by_tokens, by_text) > 0.999


def check_async_requests_run_concurrently():
    async def embed_all():
        async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            return await asyncio.gather(
                *(
                    client.embeddings.create(model=MODEL, input=[f"{text} {number}"])
                    for number in range(16)
                    for text in TEXTS
                )
            )

    answers = asyncio.run(embed_all())
    assert len(answers) == 48
    assert all(len(answer.data[0].embedding) == 384 for answer in answers)


def check_2048_inputs():
    answer = CLIENT.embeddings.create(model=MODEL, input=["a short text"] * 2048)
    first = answer.data[0].embedding
    assert len(answer.data) == 2048
    assert all(similarity(first, each.embedding) > 0.999 for each in answer.data[::100])


def check_a_batch_has_the_vectors_of_requests():
    bodies = [{"input": TEXTS}, {"input": TEXTS[0], "encoding_format": "base64"}, {"input": ""}]
    lines = [
        json.dumps(
            {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, **body}}
        )
        for number, body in enumerate(bodies)
    ]
    file = CLIENT.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = CLIENT.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = CLIENT.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1), batch
    output = [json.loads(line) for line in CLIENT.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in output] == ["0", "1"]
    vectors = openai.types.CreateEmbeddingResponse.model_validate(output[0]["response"]["body"]).data
    direct = CLIENT.embeddings.create(model=MODEL, input=TEXTS).data
    assert all(similarity(a.embedding, b.embedding) > 0.999 for a, b in zip(vectors, direct, strict=True))
    decoded = array.array("f", base64.b64decode(output[1]["response"]["body"]["data"][0]["embedding"]))
    assert similarity(decoded, direct[0].embedding) > 0.999
    (error,) = [json.loads(line) for line in CLIENT.files.content(batch.error_file_id).text.splitlines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("2", 400)
    assert batch.usage.input_tokens > 0 == batch.usage.output_tokens


def check_errors_are_bad_requests():
    for fields in ({"input": ""}, {"input": "word " * 300}, {"input": "a", "dimensions": 128}, {"input": ["a"] * 2049}):
        error = expect_error(openai.BadRequestError, CLIENT.embeddings.create, model=MODEL, **fields)
        assert error.param in ("input", "dimensions"), error
    error = expect_error(openai.BadRequestError, CLIENT.embeddings.create, model="smollm2", input="a")
    assert error.code == "wrong_model_kind"
    messages = [{"role": "user", "content": "a"}]
    error = expect_error(openai.BadRequestError, CLIENT.chat.completions.create, model=MODEL, messages=messages)
    assert error.code == "wrong_model_kind"
    expect_error(openai.NotFoundError, CLIENT.embeddings.create, model="nothing", input="a")


def check_long_text_is_cut_on_request():
    answer = CLIENT.embeddings.create(model=MODEL, input="word " * 300, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 256


def check_models_have_kinds():
    kinds = {model.id: model.kind for model in CLIENT.models.list()}
    assert kinds == {"smollm2": "generate", MODEL: "embed"}, kinds


run_checks(dict(globals()))
