"""Items as the messages of a chat: what a model thought, said and called in one go is one message of the assistant."""

from __future__ import annotations

from typing import Any

from syringa.api.chat.content import Content
from syringa.api.chat.messages import Said
from syringa.prompt.chat.template import Message
from syringa.prompt.images.images import ImageSource


class Turns:
    """Collects the messages in order."""

    def __init__(self) -> None:
        self._said: list[Said] = []
        self._turn: Message | None = None  # the assistant's, while it may go on

    @property
    def said(self) -> list[Said]:
        """The messages so far. A turn that was only thought about has no text."""
        for each in self._said:
            if each.message["content"] is None and not each.message.get("tool_calls"):
                each.message["content"] = ""
        return self._said

    def say(self, role: str, content: Content, images: list[ImageSource]) -> None:
        """The user, or who instructs the model, says something."""
        self._turn = None
        self._said.append(Said({"role": role, "content": content}, images))

    def answer(self, content: Content) -> None:
        """The assistant says something."""
        if self._turn is None or self._turn["content"] is not None or self._turn.get("tool_calls"):
            self._begin()
        self._assistant["content"] = content

    def think(self, text: str) -> None:
        if self._turn is None or self._turn["content"] is not None or self._turn.get("tool_calls"):
            self._begin()
        turn = self._assistant
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        calls = self._assistant.setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, id: str, name: str, content: Content) -> None:
        self._turn = None
        self._said.append(Said({"role": "tool", "content": content, "tool_call_id": id, "name": name}))

    def summarize(self, text: str) -> None:
        """What was said before is only known by a summary, which the assistant once wrote.

        What the user had said is kept by its side; many templates want the two to take turns, so it becomes one
        message.
        """
        start = len(self._said)
        while start and self._said[start - 1].message["role"] == "user":
            start -= 1
        self._said[start:] = joined(self._said[start:])
        self._turn = None
        self.answer(text)
        self._turn = None

    @property
    def _assistant(self) -> Message:
        if self._turn is None:
            self._begin()
        assert self._turn is not None
        return self._turn

    def _begin(self) -> None:
        self._turn = {"role": "assistant", "content": None}
        self._said.append(Said(self._turn))


def joined(said: list[Said]) -> list[Said]:
    """Messages of one role as one."""
    if len(said) < 2:
        return said
    contents = [each.message["content"] for each in said]
    content: Content
    if all(isinstance(each, str) for each in contents):
        content = "\n\n".join(contents)
    else:
        parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
        content = [part for each in parts for part in each]
    message = {**said[0].message, "content": content}
    return [Said(message, [image for each in said for image in each.images])]
