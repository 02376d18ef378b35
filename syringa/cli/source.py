"""Text generation for terminal commands: by a model loaded in this process, or by a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from syringa.cli.options import load_config
from syringa.config import single_model_spec
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

    from syringa.api.models.served_model import ServedModel
    from syringa.api.output_writer import PreparedRequest
    from syringa.engine.interface import Engine
    from syringa.engine.processes.startup_plan import MemoryPlan
    from syringa.types import LoadProgress

Fields = dict[str, Any]
Messages = Sequence[dict[str, Any]]


class TextChunk(msgspec.Struct, frozen=True):
    """A piece of output text or reasoning; the last chunk has the number of tokens instead."""

    choice: int = 0
    text: str = ""
    tokens: int | None = None
    reasoning: bool = False


class TextSource(Protocol):
    """Generates text for the request fields of the API, as a stream of chunks."""

    name: str

    def complete(self, fields: Fields) -> AsyncGenerator[TextChunk]: ...

    def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[TextChunk]: ...


@contextlib.asynccontextmanager
async def open_source(
    flags: Mapping[str, Any],
    file: Path | None,
    url: str | None,
    key: str | None,
    on_plan: Callable[[MemoryPlan], None] = lambda plan: None,
    on_progress: Callable[[LoadProgress], None] | None = None,
    *,
    chat: bool = False,
) -> AsyncIterator[TextSource]:
    """Open the server at `url`, or load the model if `url` is None.

    `on_plan` is called with what will be loaded, before it is, and `on_progress` while it is. For a `chat`, the model
    needs a chat template. Raise `StartupError` if the model cannot be used.
    """
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
    config = load_config(flags, file)

    from syringa.api.models.loading import load_model

    local_model = load_model(config)
    if local_model.kind != "generate":
        raise ModelError(
            f"{local_model.id} generates no text: serve it with `syringa serve --embedding-model {config.model}`"
        )
    if chat and local_model.template is None:
        raise ModelError(
            f"{local_model.id} has no chat template: use `syringa complete --model {config.model}`, or "
            "--chat-template FILE"
        )

    from syringa.engine.client.local import start_local
    from syringa.engine.processes.startup_plan import plan_model

    plan = plan_model(single_model_spec(config), config)
    if plan is not None:
        on_plan(plan)
    free = plan.free if plan is not None and plan.device == "cpu" else 0
    async with start_local(config, free, on_progress) as engine:
        info, _ = await engine.wait_ready()
        local_model.max_model_len = min(local_model.max_model_len, info.max_model_len)
        yield LocalSource(engine, local_model)


class LocalSource:
    """Runs requests on an engine in this process, as the server would."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine, self._model = engine, model
        self.name = model.id

    async def complete(self, fields: Fields) -> AsyncGenerator[TextChunk]:
        from syringa.api.completions.request import CompletionRequest, prepare_completion
        from syringa.api.decoding import convert
        from syringa.api.models.served_model import FixedModels

        call = await prepare_completion(convert(fields, CompletionRequest), FixedModels([self._model]), [])
        async for chunk in self._chunks(call):
            yield chunk

    async def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[TextChunk]:
        from syringa.api.chat.request import ChatRequest, prepare_chat
        from syringa.api.decoding import convert
        from syringa.api.models.served_model import FixedModels

        body = convert({"messages": list(messages), **fields}, ChatRequest)
        try:
            call = await prepare_chat(body, FixedModels([self._model]), [])
        except ContextLengthExceeded as error:
            if error.param != "messages":
                raise
            raise InvalidRequest(f"{error.message} /reset starts a new conversation.") from None
        async for chunk in self._chunks(call):
            yield chunk

    async def _chunks(self, call: PreparedRequest) -> AsyncGenerator[TextChunk]:
        from syringa.events import ReasoningDelta, TextDelta, Usage
        from syringa.generation import stream_events

        async with contextlib.aclosing(stream_events(self._engine, self._model.tokenizer, call.request)) as events:
            async for event in events:
                if isinstance(event, TextDelta | ReasoningDelta):
                    yield TextChunk(event.choice, event.text, reasoning=isinstance(event, ReasoningDelta))
                elif isinstance(event, Usage):
                    yield TextChunk(tokens=event.completion_tokens)


class RemoteSource:
    """Sends requests to a server over HTTP."""

    def __init__(self, http: httpx.AsyncClient, model: Fields) -> None:
        self._http, self._model = http, model
        self.name = model.get("model", str(http.base_url))

    async def complete(self, fields: Fields) -> AsyncGenerator[TextChunk]:
        async for chunk in self._stream("/v1/completions", fields):
            for choice in chunk["choices"]:
                yield TextChunk(choice["index"], choice["text"])
            if chunk.get("usage"):
                yield TextChunk(tokens=chunk["usage"]["completion_tokens"])

    async def chat(self, messages: Messages, fields: Fields) -> AsyncGenerator[TextChunk]:
        async for chunk in self._stream("/v1/chat/completions", {"messages": list(messages), **fields}):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                    yield TextChunk(choice["index"], reasoning, reasoning=True)
                if text := choice["delta"].get("content"):
                    yield TextChunk(choice["index"], text)
            if chunk.get("usage"):
                yield TextChunk(tokens=chunk["usage"]["completion_tokens"])

    async def _stream(self, path: str, fields: Fields) -> AsyncGenerator[Any]:
        import httpx

        body = {**self._model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _error(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = msgspec.json.decode(line[6:])
                        if "error" in chunk:
                            raise EngineUnavailable(chunk["error"]["message"])
                        yield chunk
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnavailable(f"{self._http.base_url}: {str(error) or type(error).__name__}") from None


def _error(status: int, body: bytes) -> SyringaError:
    """Return the error of a response, with the server's message if it has one."""
    message = f"the server answered {status}"
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        message += f": {msgspec.json.decode(body)['error']['message']}"
    return InvalidRequest(message) if status < 500 else EngineError(message)
