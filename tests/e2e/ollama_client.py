"""The official `ollama` package for Python. It runs in the environment of that package.

python ollama_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import sys
import time

import ollama
from client_checks import expect_error, run_checks
from pydantic import BaseModel, Field

URL, KEY, MODEL = sys.argv[1:]
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)
QUESTION = "What is the capital of France?"
ASKED = [{"role": "user", "content": QUESTION}]
EXACT = {"temperature": 0, "num_predict": 60}


class Language(BaseModel):
    name: str = Field(max_length=20)
    year: int = Field(ge=1950, le=2025)


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
      city: The city to get the weather for
    """
    return f"Sunny in {city}"


def chat(**fields):
    return client.chat(**{"model": MODEL, "messages": ASKED, "options": EXACT} | fields)


def generate(**fields):
    return client.generate(**{"model": MODEL, "prompt": QUESTION, "options": EXACT} | fields)


def check_chat() -> None:
    answer = chat()
    assert "Paris" in answer.message.content
    assert (answer.model, answer.message.role, answer.done, answer.done_reason) == (MODEL, "assistant", True, "stop")
    assert answer.prompt_eval_count > 10
    assert 0 < answer.eval_count < 60
    assert answer.eval_duration > 0
    assert answer.total_duration >= answer.eval_duration + answer.prompt_eval_duration
    assert not answer.message.tool_calls


def check_chat_stream() -> None:
    whole = chat()
    parts = list(chat(stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def check_generate() -> None:
    whole = generate(system="Answer in one sentence.")
    parts = list(generate(system="Answer in one sentence.", stream=True))
    assert whole.response
    assert "".join(part.response for part in parts) == whole.response
    assert parts[-1].context == whole.context
    more = generate(prompt="And of Italy?", context=whole.context)
    assert more.prompt_eval_count > len(whole.context)


def check_raw() -> None:
    raw = generate(prompt="The capital of France is", raw=True, options={"temperature": 0, "num_predict": 4})
    assert "Paris" in raw.response
    assert (raw.context, raw.eval_count, raw.done_reason) == (None, 4, "length")


def check_options() -> None:
    seeded = {"seed": 7, "temperature": 1.5, "num_predict": 12}
    assert chat(options=seeded).message.content == chat(options=seeded).message.content
    short = chat(options=ollama.Options(num_predict=5, stop=["Paris"], temperature=0))
    assert short.eval_count <= 5
    assert "Paris" not in short.message.content


def check_format() -> None:
    found = chat(format=Language.model_json_schema(), options={"temperature": 0})
    assert Language.model_validate_json(found.message.content)
    assert generate(format="json", options={"temperature": 0, "num_predict": 60}).response.lstrip().startswith("{")


def check_logprobs() -> None:
    answer = chat(logprobs=True, top_logprobs=2, options={"temperature": 0, "num_predict": 3})
    assert len(answer.logprobs) == 3
    assert len(answer.logprobs[0].top_logprobs) == 2


def check_tools() -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = chat(messages=asked, tools=[get_weather])
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(call.function.arguments["city"], str)
    streamed = [
        call
        for part in chat(messages=asked, tools=[get_weather], stream=True)
        for call in part.message.tool_calls or ()
    ]
    assert streamed[0].function.arguments == call.function.arguments
    result = {"role": "tool", "content": get_weather(**call.function.arguments), "tool_name": "get_weather"}
    assert chat(messages=[*asked, answer.message, result]).message.content


def check_embed() -> None:
    names = [each.model for each in client.list().models if "MiniLM" in each.model]
    if not names:  # it could not be downloaded
        return
    found = client.embed(names[0], input=["a lilac in bloom", "a river", "a blooming shrub"])
    first, second, third = found.embeddings
    assert len(first) == 384
    assert abs(sum(value * value for value in first) - 1) < 1e-3
    similar, different = (sum(a * b for a, b in zip(first, each, strict=True)) for each in (third, second))
    assert similar > different
    assert found.prompt_eval_count > 9
    assert len(client.embeddings(names[0], prompt="a river").embedding) == 384
    assert "embedding" in client.show(names[0]).capabilities
    assert expect_error(ollama.ResponseError, client.embed, MODEL, input="x").status_code == 400


def check_models() -> None:
    (listed,) = [each for each in client.list().models if each.model == f"{MODEL}:latest"]
    assert listed.size > 90_000_000
    assert listed.details.quantization_level == "Q4_1"
    shown = client.show(MODEL)
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "completion" in shown.capabilities
    assert shown.template
    (running,) = [each for each in client.ps().models if each.model == f"{MODEL}:latest"]
    assert running.context_length == 1280


def check_create_copy_delete() -> None:
    lines = list(
        client.create("pirate", from_=MODEL, system="You are a pirate.", parameters={"temperature": 0}, stream=True)
    )
    assert lines[-1].status == "success"
    assert client.show("pirate").modelfile.count("You are a pirate.") == 1
    longer = client.chat("pirate", messages=ASKED, options={"num_predict": 5})
    own = [{"role": "system", "content": "You are a pirate."}, *ASKED]
    assert longer.prompt_eval_count == chat(messages=own, options={"num_predict": 5}).prompt_eval_count
    assert client.copy("pirate", "buccaneer").status == "success"
    assert {"pirate:latest", "buccaneer:latest"} <= {each.model for each in client.list().models}
    for name in ("pirate", "buccaneer"):
        assert client.delete(name).status == "success"
    error = expect_error(ollama.ResponseError, client.delete, "pirate")
    assert error.status_code == 404


def check_pull() -> None:
    statuses = [line.status for line in client.pull("smollm2", stream=True)]
    assert (statuses[0], statuses[-1]) == ("pulling manifest", "success")
    assert client.pull("smollm2").status == "success"
    error = expect_error(ollama.ResponseError, client.pull, "no-such-model")
    assert error.status_code == 404


def check_keep_alive() -> None:
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    for _ in range(600):
        if f"{MODEL}:latest" not in [each.model for each in client.ps().models]:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the model was not unloaded")
    assert client.generate(MODEL, keep_alive="1h").done_reason == "load"
    assert chat(keep_alive=-1).load_duration == 0


def check_async() -> None:
    async def ask():
        asynchronous = ollama.AsyncClient(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=600)
        parts = await asynchronous.chat(model=MODEL, messages=ASKED, options=EXACT, stream=True)
        return "".join([part.message.content async for part in parts])

    assert asyncio.run(ask()) == chat().message.content


def check_errors() -> None:
    error = expect_error(ollama.ResponseError, chat, model="none")
    assert (error.status_code, error.error) == (404, "model 'none' not found")
    error = expect_error(ollama.ResponseError, chat, options={"temperature": 9})
    assert (error.status_code, "options.temperature" in error.error) == (400, True)
    error = expect_error(ollama.ResponseError, chat, think=True)
    assert "does not support thinking" in error.error


if __name__ == "__main__":
    run_checks(globals())
