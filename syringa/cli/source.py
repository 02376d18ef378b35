"""Where the terminal's text comes from: a model loaded here, or a server. Both take the API's fields."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from syringa.cli.reading import read_settings
from syringa.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelError,
    SyringaError,
)

if TYPE_CHECKING:
    import httpx

    from syringa.api.decoding import Call
    from syringa.api.models.served_model import ServedModel
    from syringa.engine.interface import Engine

Fields = dict[str, Any]
Messages = Sequence[dict[str, Any]]


class Part(msgspec.Struct, frozen=True):
    """Some text of an answer, or of the thought before it; the last part has the number of tokens instead."""

    choice: int = 0
    text: str = ""
    tokens: int | None = None
    thought: bool = False


class Source(Protocol):
    """Answers, as they come."""

    name: str

    def complete(self, fields: Fields) -> AsyncGenerator[Part]: ...

    def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[Part]: ...


@contextlib.asynccontextmanager
async def open_source(
    flags: Mapping[str, Any], file: Path | None, url: str | None, key: str | None
) -> AsyncIterator[Source]:
    """A server's source if there is a `url`, else the model itself."""
    if url is not None:
        import httpx

        headers = {"authorization": f"Bearer {key}"} if key else {}
        model = {"model": flags["model"]} if "model" in flags else {}
        timeout = httpx.Timeout(10, read=None)
        async with httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout
        ) as http:
            yield RemoteSource(http, model)
        return
    config = read_settings(flags, file)

    from syringa.api.models.loading import load_model

    model_here = load_model(config)

    from syringa.engine.client.local import start_local

    async with start_local(config) as engine:
        await engine.wait_ready()
        yield LocalSource(engine, model_here)


class LocalSource:
    """The same path as a request to the server takes, without the server."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine, self._model = engine, model
        self.name = model.id

    async def complete(self, fields: Fields) -> AsyncGenerator[Part]:
        from syringa.api.completions.request import CompletionRequest, to_generation
        from syringa.api.decoding import convert
        from syringa.api.models.served_model import FixedModels

        call = await to_generation(convert(fields, CompletionRequest), FixedModels([self._model]), [])
        async for part in self._parts(call):
            yield part

    async def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[Part]:
        from syringa.api.chat.request import ChatRequest, to_generation
        from syringa.api.decoding import convert
        from syringa.api.models.served_model import FixedModels

        if self._model.template is None:
            raise ModelError(f"{self.name} has no chat template: use `syringa complete`")
        body = convert({"messages": list(messages), **fields}, ChatRequest)
        try:
            call = await to_generation(body, FixedModels([self._model]), [])
        except ContextLengthExceeded as error:
            if error.param != "messages":
                raise
            raise InvalidRequest(f"{error.message} /reset begins a new conversation.") from None
        async for part in self._parts(call):
            yield part

    async def _parts(self, call: Call) -> AsyncGenerator[Part]:
        from syringa.events import ReasoningDelta, TextDelta, Usage
        from syringa.generation import stream

        async with contextlib.aclosing(stream(self._engine, self._model.tokenizer, call.request)) as events:
            async for event in events:
                if isinstance(event, TextDelta | ReasoningDelta):
                    yield Part(event.choice, event.text, thought=isinstance(event, ReasoningDelta))
                elif isinstance(event, Usage):
                    yield Part(tokens=event.completion_tokens)


class RemoteSource:
    """A server's answers over HTTP."""

    def __init__(self, http: httpx.AsyncClient, model: Fields) -> None:
        self._http, self._model = http, model
        self.name = model.get("model", str(http.base_url))

    async def complete(self, fields: Fields) -> AsyncGenerator[Part]:
        async for chunk in self._stream("/v1/completions", fields):
            for choice in chunk["choices"]:
                yield Part(choice["index"], choice["text"])
            if chunk.get("usage"):
                yield Part(tokens=chunk["usage"]["completion_tokens"])

    async def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[Part]:
        async for chunk in self._stream("/v1/chat/completions", {"messages": list(messages), **fields}):
            for choice in chunk["choices"]:
                if thought := choice["delta"].get("reasoning"):
                    yield Part(choice["index"], thought, thought=True)
                if text := choice["delta"].get("content"):
                    yield Part(choice["index"], text)
            if chunk.get("usage"):
                yield Part(tokens=chunk["usage"]["completion_tokens"])

    async def _stream(self, path: str, fields: Fields) -> AsyncGenerator[Any]:
        import httpx

        body = {**self._model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = msgspec.json.decode(line[6:])
                        if "error" in chunk:
                            raise EngineUnavailable(chunk["error"]["message"])
                        yield chunk
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnavailable(f"{self._http.base_url}: {str(error) or type(error).__name__}") from None


def _refusal(status: int, body: bytes) -> SyringaError:
    """What a server's refusal says, whoever wrote the server."""
    said = f"the server answered {status}"
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        said += f": {msgspec.json.decode(body)['error']['message']}"
    return InvalidRequest(said) if status < 500 else EngineError(said)
