"""`litellm` with its providers for Ollama: `/api/generate` and `/api/chat`. It runs in the environment of that package.

python litellm_ollama_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch prices

import litellm
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
PROVIDERS = ("ollama", "ollama_chat")
litellm.suppress_debug_info = True  # printed to the output of the checks
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "year": {"type": "integer", "minimum": 1950}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


def fields(provider, **given):
    server = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
    return server | {"messages": ASKED, "temperature": 0, "max_tokens": 60} | given


def check_completion() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**fields(provider))
        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens > 5
        assert answer.usage.completion_tokens > 0


def check_stream() -> None:
    for provider in PROVIDERS:
        whole = litellm.completion(**fields(provider))
        chunks = list(litellm.completion(**fields(provider, stream=True)))
        built = litellm.stream_chunk_builder(chunks, messages=ASKED)
        assert built.choices[0].message.content == whole.choices[0].message.content


def check_async_stream() -> None:
    async def ask():
        stream = await litellm.acompletion(**fields("ollama_chat", stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = litellm.completion(**fields("ollama_chat"))
    assert asyncio.run(ask()) == whole.choices[0].message.content


def check_parameters() -> None:
    for provider in PROVIDERS:
        given = {"temperature": 1.5, "seed": 7, "top_p": 0.9, "stop": ["Berlin"], "max_tokens": 12, "num_ctx": 512}
        first, second = (litellm.completion(**fields(provider, **given)) for _ in range(2))
        assert first.choices[0].message.content == second.choices[0].message.content
        assert first.usage.completion_tokens <= 12


def check_structured_output() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "language", "schema": SCHEMA}}
    for provider in PROVIDERS:
        answer = litellm.completion(**fields(provider, response_format=format, max_tokens=200))
        assert json.loads(answer.choices[0].message.content).keys() == {"name", "year"}


def check_errors() -> None:
    for provider in PROVIDERS:
        error = expect_error(litellm.NotFoundError, litellm.completion, **fields(provider, model=f"{provider}/none"))
        assert "not found" in str(error)


if __name__ == "__main__":
    run_checks(globals())
