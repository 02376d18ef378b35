"""The `system` and `messages` fields: validation, and conversion to a conversation."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from syringa.api.anthropic.content import PART_TYPES, Part, PartReader, block_type, read_cache_control
from syringa.api.anthropic.conversation import Conversation, Turn
from syringa.api.anthropic.request import CacheControl, PromptBody
from syringa.api.anthropic.schemas import SERVER_BLOCKS
from syringa.api.anthropic.thinking import OpenThinking
from syringa.api.anthropic.tool_changes import TOOL_CHANGES, read_tool_change
from syringa.api.decoding import convert
from syringa.api.fields.hosted_tools import UnsupportedTools, report_hosted_tool
from syringa.errors import InvalidRequest
from syringa.prompt.images.loader import ImageSource

_INLINE_BLOCKS = 200  # more take milliseconds, and are read in a thread
# A line for Anthropic's accounting in the system prompt of Claude Code. It changes with every request, and would keep
# all that follows from being found in the prefix cache.
_BILLING_LINE = "x-anthropic-billing-header:"


class MessageField(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Any = None
    output_config: dict[str, Any] | None = None  # of system messages


class ToolUseField(msgspec.Struct, kw_only=True):
    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultField(msgspec.Struct, kw_only=True):
    type: str
    tool_use_id: str
    content: Any = None
    is_error: bool = False
    cache_control: Any = None


class ToolReferenceField(msgspec.Struct, kw_only=True):
    type: str
    tool_name: str
    cache_control: Any = None


class ThinkingBlockField(msgspec.Struct, kw_only=True):
    type: str
    thinking: str
    signature: str
    cache_control: Any = None


class RedactedThinkingField(msgspec.Struct, kw_only=True):
    type: str
    data: str
    cache_control: Any = None


class CompactionField(msgspec.Struct, kw_only=True):
    """A summary of messages that are no longer sent. Other fields repeat it for Anthropic's server."""

    type: str
    content: str | None = None
    tool_changes: list[Any] | None = None
    encrypted_content: str | None = None
    signature: str | None = None
    cache_control: Any = None


async def read_conversation(
    body: PromptBody,
    ignored: list[str],
    *,
    supports_images: bool,
    supports_late_system: bool,
    open_thinking: OpenThinking,
    unsupported: UnsupportedTools,
) -> Conversation:
    """Validate the system prompt and the messages. Raises `InvalidRequest`.

    Without `supports_late_system`, system messages become text of the turns around them. `open_thinking` verifies
    thinking blocks. The paths of what is left out of the prompt are appended to `ignored`.
    """
    parts = PartReader(supports_images=supports_images, ignored=ignored)
    reader = _Reader(parts, open_thinking, unsupported, supports_late_system)
    is_long = _has_more_blocks([body.system, *body.messages[: _INLINE_BLOCKS + 1]], _INLINE_BLOCKS)
    return await asyncio.to_thread(reader.read, body) if is_long else reader.read(body)


def _has_more_blocks(values: list[Any], limit: int) -> bool:
    """Return whether messages, and the blocks in them and in their blocks, are more than `limit`."""
    count = 0
    pending = values
    while pending and count <= limit:
        value = pending.pop()
        if isinstance(value, list):
            count += len(value)
            pending += value[: limit + 1]
        elif isinstance(value, dict):
            count += 1
            pending += [value.get("content"), value.get("source")]
    return count > limit


class _Reader:
    """Reads messages in order, and remembers the tool calls that later ones may answer."""

    def __init__(
        self,
        parts: PartReader,
        open_thinking: OpenThinking,
        unsupported: UnsupportedTools,
        supports_late_system: bool,
    ) -> None:
        self._parts, self._open_thinking, self._unsupported = parts, open_thinking, unsupported
        self._supports_late_system = supports_late_system
        self._ignored = parts.ignored
        self._conversation = Conversation()
        self._calls: dict[str, str] = {}  # tool name by call id

    def read(self, body: PromptBody) -> Conversation:
        conversation = self._conversation
        self._system(body.system)
        for index, given in enumerate(body.messages):
            self._message(given, f"messages[{index}]", last=index == len(body.messages) - 1)
        if not conversation.turns:
            raise InvalidRequest("messages: expected a message with content.", param="messages")
        if conversation.continues and conversation.turns[-1].calls:
            raise InvalidRequest(
                "messages: the last message has tool_use blocks, which the next message has to answer with tool_result"
                " blocks.",
                param="messages",
            )
        conversation.mark_here(read_cache_control(body.cache_control, "", self._ignored))
        return conversation

    def _system(self, given: Any) -> None:
        if given is None:
            return
        blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
        if not isinstance(blocks, list):
            raise InvalidRequest("system: expected a string or an array of text blocks.", param="system")
        for index, block in enumerate(blocks):
            path = f"system[{index}]"
            ((part,), _) = self._parts.read_block(block, path, ("text",))
            if part.text.startswith(_BILLING_LINE):
                self._ignored.append("system" if isinstance(given, str) else path)
                _, _, rest = part.text.partition("\n")
                part = Part(rest.lstrip("\n"))
                if not part.text:
                    continue
            self._conversation.system.append(part)
            control = read_cache_control(block.get("cache_control"), path, self._ignored)
            self._conversation.mark = self._conversation.prefix_mark(control) or self._conversation.mark

    def _message(self, given: Any, path: str, *, last: bool) -> None:
        message = convert(given, MessageField, path=path, ignored=self._ignored)
        if message.output_config:
            self._ignored.append(f"{path}.output_config")
        is_last = last and message.role == "assistant"
        may_be_empty = is_last or (message.role == "system" and bool(message.output_config))
        path += ".content"
        content = message.content
        if isinstance(content, str):
            if content or not may_be_empty:
                self._add_parts(message.role, [Part(content)])
            return
        if not isinstance(content, list):
            raise InvalidRequest(f"{path}: expected a string or an array of blocks.", param=path)
        if not content and not may_be_empty:
            raise InvalidRequest(f"{path}: only the last message of the assistant may be empty.", param=path)
        read = {"user": self._user_block, "assistant": self._assistant_block, "system": self._system_block}[
            message.role
        ]
        images: list[ImageSource] = []  # of results of tools
        for index, block in enumerate(content):
            where = f"{path}[{index}]"
            kind = block_type(block, where)
            if images and kind != "tool_result":
                self._add_images(images)
            if kind in SERVER_BLOCKS:
                report_hosted_tool(kind, where, self._unsupported, self._ignored)
            elif kind in TOOL_CHANGES:
                self._change_tools(kind, block, where)
            elif kind == "compaction":
                self._compaction(message.role, block, where)
            else:
                images += read(kind, block, where)
            self._conversation.mark_here(read_cache_control(block.get("cache_control"), where, self._ignored))
        self._add_images(images)

    def _add_images(self, images: list[ImageSource]) -> None:
        """Add the images in results of tools to the user message after them: few templates have any elsewhere."""
        if images:
            self._conversation.turn("user").parts += [Part(image=image) for image in images]
            images.clear()

    def _user_block(self, kind: str, given: Any, path: str) -> list[ImageSource]:
        """Add a block of the user. Return the images in the result of a tool."""
        if kind == "tool_result":
            return self._tool_result(given, path)
        if kind not in PART_TYPES:
            raise _unexpected(kind, path, "user", (*PART_TYPES, "tool_result"))
        self._add_block("user", given, path)
        return []

    def _system_block(self, kind: str, given: Any, path: str) -> list[ImageSource]:
        self._add_block("system", given, path, ("text",))
        return []

    def _add_block(self, role: str, given: Any, path: str, known: tuple[str, ...] = PART_TYPES) -> None:
        parts, control = self._parts.read_block(given, path, known)
        self._add_parts(role, parts)
        self._conversation.mark_here(control)

    def _add_parts(self, role: str, parts: list[Part]) -> None:
        if role != "system" or self._supports_late_system:
            self._conversation.turn(role).parts += parts
            return
        for part in parts:
            self._conversation.add_system_text(part.text)

    def _change_tools(self, kind: str, given: Any, path: str) -> None:
        change = read_tool_change(kind, given, path, self._ignored)
        if change is not None:
            self._conversation.tool_changes.append(change)

    def _compaction(self, role: str, given: Any, path: str) -> None:
        block = convert(given, CompactionField, path=path, ignored=self._ignored)
        if block.content is None:
            self._ignored.append(f"{path} (compaction)")
        else:
            self._add_parts(role, [Part(f"Summary of the conversation before:\n{block.content}")])
        for index, change in enumerate(block.tool_changes or []):
            where = f"{path}.tool_changes[{index}]"
            kind = block_type(change, where)
            if kind not in TOOL_CHANGES:
                raise _unexpected(kind, where, "compaction", TOOL_CHANGES)
            self._change_tools(kind, change, where)
            self._conversation.mark_here(read_cache_control(change.get("cache_control"), where, self._ignored))

    def _assistant_block(self, kind: str, given: Any, path: str) -> list[ImageSource]:
        turn = self._conversation.turn("assistant")
        match kind:
            case "text":
                self._add_block("assistant", given, path)
            case "tool_use":
                call = convert(given, ToolUseField, path=path, ignored=self._ignored)
                self._calls[call.id] = call.name
                function = {"name": call.name, "arguments": call.input}
                turn.calls.append({"id": call.id, "type": "function", "function": function})
            case "thinking":
                thinking = convert(given, ThinkingBlockField, path=path, ignored=self._ignored)
                turn.reasoning.append(self._open_thinking(thinking.signature, thinking.thinking, path))
            case "redacted_thinking":
                redacted = convert(given, RedactedThinkingField, path=path, ignored=self._ignored)
                turn.reasoning.append(self._open_thinking(redacted.data, None, path))
            case _:
                known = ("text", "tool_use", "thinking", "redacted_thinking")
                raise _unexpected(kind, path, "assistant", known)
        return []

    def _tool_result(self, given: Any, path: str) -> list[ImageSource]:
        result = convert(given, ToolResultField, path=path, ignored=self._ignored)
        name = self._calls.get(result.tool_use_id)
        if name is None:
            path += ".tool_use_id"
            raise InvalidRequest(f"{path}: no earlier message has a tool_use block {result.tool_use_id!r}.", param=path)
        parts, control = self._result_parts(result.content, f"{path}.content")
        if result.is_error:
            parts.insert(0, Part("Error:"))
        self._conversation.turns.append(Turn("tool", parts, answers=(result.tool_use_id, name)))
        self._conversation.mark_here(control)
        return [part.image for part in parts if part.image is not None]

    def _result_parts(self, content: Any, path: str) -> tuple[list[Part], CacheControl | None]:
        """Read the content of a result. Return its parts, and the last `cache_control` in it."""
        if content is None or isinstance(content, str):
            return [Part(content or "")], None
        if not isinstance(content, list):
            raise InvalidRequest(f"{path}: expected a string or an array of blocks.", param=path)
        parts: list[Part] = []
        control: CacheControl | None = None
        for index, block in enumerate(content):
            where = f"{path}[{index}]"
            kind = block_type(block, where)
            nested: CacheControl | None = None
            if kind == "browser_state":  # of a tool that its models are trained on
                report_hosted_tool(kind, where, self._unsupported, self._ignored)
            elif kind == "tool_reference":
                reference = convert(block, ToolReferenceField, path=where, ignored=self._ignored)
                self._conversation.referenced_tools.add(reference.tool_name)
                parts.append(Part(f"Tool: {reference.tool_name}"))
            else:
                added, nested = self._parts.read_block(block, where, (*PART_TYPES, "tool_reference"))
                parts += added
            control = read_cache_control(block.get("cache_control"), where, self._ignored) or nested or control
        return parts, control


def _unexpected(kind: str, path: str, role: str, known: tuple[str, ...]) -> InvalidRequest:
    return InvalidRequest(
        f"{path}.type: supported blocks of {role} messages are {', '.join(known)}, not {kind!r}.", param=f"{path}.type"
    )
