"""The requests of a response with MCP servers after the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from syringa.api.chat.prompt import ChatPrompt
from syringa.api.fields.tools import ToolRequest
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.context import Item, ResponseContext
from syringa.api.responses.generation_request import ParsedFields, build_generation_request
from syringa.api.responses.input import read_input
from syringa.api.responses.mcp.rounds import NextRequest
from syringa.api.responses.prompt_builder import build_prompt
from syringa.api.responses.request import ResponseRequest
from syringa.api.responses.tools import ResponseTools
from syringa.api.responses.writer import ResponseWriter
from syringa.events import GenerationRequest


class NextRequestBuilder:
    """Builds the requests of a response after the first one, whose prompts continue with the output so far."""

    def __init__(
        self,
        body: ResponseRequest,
        model: ServedModel,
        fields: ParsedFields,
        context: ResponseContext,
        items: Sequence[Item],
        writer: ResponseWriter,
        first: GenerationRequest,
        prompt: ChatPrompt,
    ) -> None:
        """`items` are those of the input, `first` and `prompt` the first request and its prompt."""
        self._body, self._model, self._fields = body, model, fields
        self._context, self._items, self._writer = context, items, writer
        self._first, self._prompt = first, prompt

    async def build(self, next: NextRequest) -> GenerationRequest | None:
        body, model = self._body, self._model
        left = None if body.max_output_tokens is None else body.max_output_tokens - next.output_tokens
        if left is not None and left <= 0:
            return None
        body = msgspec.structs.replace(body, max_output_tokens=left, min_tokens=None)
        fields = dataclasses.replace(self._fields, tools=self._tools(next))
        history = [*self._context.history, *self._items, *self._writer.output]
        parsed = await read_input(
            None,
            dataclasses.replace(self._context, history=history),
            supports_images=model.supports_images,
            ignored=[],
        )
        prompt = await build_prompt(
            parsed.messages,
            model,
            instructions=body.instructions,
            reasoning=fields.reasoning,
            tools=fields.tool_use,
            max_tokens=left,
            truncate=body.truncation == "auto" or bool(body.truncate_sequence),
        )
        same_images = [each.url for each in prompt.images] == [each.url for each in self._prompt.images]
        images = self._first.images if same_images else None
        request = await build_generation_request(body, model, fields, prompt, self._context.tenant, images)
        return msgspec.structs.replace(request, id=f"{self._first.id}-{next.number}")

    def _tools(self, next: NextRequest) -> ResponseTools:
        """Return the tools that may be called next. A choice that required a call has had it."""
        tools = self._fields.tools
        if tools.request is None:
            return tools
        use = tools.request.use
        names = use.callable
        if not next.mcp:
            names -= {each.tool.name for each in self._fields.mcp.definitions}
        if not names or (next.calls_left is not None and next.calls_left <= 0):
            return msgspec.structs.replace(tools, request=None)
        parallel = self._body.parallel_tool_calls is not False and next.calls_left != 1
        use = msgspec.structs.replace(use, mode="auto", callable=names, parallel=parallel)
        return msgspec.structs.replace(tools, request=ToolRequest(use=use))
