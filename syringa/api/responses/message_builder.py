"""Builds chat messages from items: consecutive reasoning, text and calls of the model are one assistant message."""

from __future__ import annotations

from typing import Any

from syringa.api.chat.content import Content
from syringa.api.chat.messages import PromptMessage
from syringa.prompt.chat.template import Message
from syringa.prompt.images.loader import ImageSource


class MessageBuilder:
    """Collects the messages of a conversation in order."""

    def __init__(self) -> None:
        self._messages: list[PromptMessage] = []
        self._current: Message | None = None  # the assistant message that items are added to

    @property
    def messages(self) -> list[PromptMessage]:
        """The messages so far. An assistant message of reasoning alone has an empty text."""
        for each in self._messages:
            if each.message["content"] is None and not each.message.get("tool_calls"):
                each.message["content"] = ""
        return self._messages

    def add_message(self, role: str, content: Content, images: list[ImageSource]) -> None:
        """Add a user, system or developer message."""
        self._current = None
        self._messages.append(PromptMessage({"role": role, "content": content}, images))

    def add_answer(self, content: Content) -> None:
        """Add a text of the assistant."""
        if self._current is None or self._current["content"] is not None or self._current.get("tool_calls"):
            self._begin()
        self._assistant["content"] = content

    def add_reasoning(self, text: str) -> None:
        if self._current is None or self._current["content"] is not None or self._current.get("tool_calls"):
            self._begin()
        message = self._assistant
        before = message.get("reasoning_content")
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def add_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        calls = self._assistant.setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, id: str, name: str, content: Content) -> None:
        self._current = None
        self._messages.append(PromptMessage({"role": "tool", "content": content, "tool_call_id": id, "name": name}))

    def add_summary(self, text: str) -> None:
        """Add the summary of a compacted conversation as an assistant message.

        The user messages before it are merged, since many templates require user and assistant to alternate.
        """
        start = len(self._messages)
        while start and self._messages[start - 1].message["role"] == "user":
            start -= 1
        self._messages[start:] = merge_messages(self._messages[start:])
        self._current = None
        self.add_answer(text)
        self._current = None

    @property
    def _assistant(self) -> Message:
        if self._current is None:
            self._begin()
        assert self._current is not None
        return self._current

    def _begin(self) -> None:
        self._current = {"role": "assistant", "content": None}
        self._messages.append(PromptMessage(self._current))


def merge_messages(messages: list[PromptMessage]) -> list[PromptMessage]:
    """Merge messages of the same role into one."""
    if len(messages) < 2:
        return messages
    contents = [each.message["content"] for each in messages]
    content: Content
    if all(isinstance(each, str) for each in contents):
        content = "\n\n".join(contents)
    else:
        parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
        content = [part for each in parts for part in each]
    message = {**messages[0].message, "content": content}
    return [PromptMessage(message, [image for each in messages for image in each.images])]
