"""Renders a model's chat template, to the character as transformers does, without importing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from syringa.errors import InvalidRequest, ModelError
from syringa.output_formats import ReasoningMarkers

Message = dict[str, Any]

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_IMAGES = ("image", "image_url", "input_image")

# Put behind the text that is to be continued, and looked for in the prompt. The space tells whether the template trims.
_CUT = "SYRINGA-CONTINUES-HERE "
_SEEN, _UNSEEN = "syringa-shows-this", "syringa-hides-this"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A function.", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """A chat template, and where the model has one, its other template for requests with tools."""

    def __init__(
        self, source: str, special_tokens: dict[str, Any] | None = None, tool_source: str | None = None
    ) -> None:
        special = special_tokens or {}
        self._plain = _Source(source, special)
        # With tools a template may take another way through its messages, even where it is the same.
        self._with_tools = _Source(tool_source or source, special, tools=[_TOOL])
        self.variables = template_variables(source) | template_variables(tool_source or "")
        """The names that the template reads: `tools` where it knows tools, `enable_thinking` where thinking can be
        turned off."""
        self.takes_parts = self._plain.takes_parts
        """Whether content may be a list of text and image parts; otherwise the texts of a list are joined."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. It begins with the model's first token where the template writes it: do not add it again.

        `continue_final_message` leaves the last message open, for the model to go on with.
        """
        extra = kwargs or {}
        if not messages:
            raise InvalidRequest("there must be at least one message", param="messages")
        if taken := _RESERVED & extra.keys():
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins another: "
                "set one of them",
                param="continue_final_message",
            )
        source = self._plain if tools is None else self._with_tools
        shaped = [_with_reasoning(source.shape(message, index)) for index, message in enumerate(messages)]
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return source.render(shaped, given, extra)
        param = f"messages[{len(shaped) - 1}].content"
        text, shaped[-1] = _marked(shaped[-1], param)
        return _cut(source.render(shaped, given, extra), text, param)


def opens_reasoning(prompt: str, marks: ReasoningMarkers) -> bool:
    """Whether a rendered prompt has begun a thought, which the model only has to go on with.

    Only its very end counts: what users write may have marks in it.
    """
    return prompt.rstrip().endswith(marks.begin.rstrip())


class _Source:
    """One template, and the shape in which it wants the content of messages.

    That is found out by trying, because templates reach the parts of a content in too many ways to be read off.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> None:
        self._template = _compile(source)
        self._special_tokens = special_tokens
        self.takes_parts = self._shows([{"type": "text", "text": _SEEN, _UNSEEN: _UNSEEN}], tools)
        self._takes_text = not self.takes_parts or self._shows(_SEEN, tools)

    def render(self, messages: list[Message], given: dict[str, Any], extra: dict[str, Any]) -> str:
        try:
            # As one dictionary: a client may use any name, `self` too.
            return self._template.render({**self._special_tokens, **extra, **given, "messages": messages})
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error
        except Exception as error:
            # What a template does with a message of an unexpected shape can fail in any way that Python can.
            raise InvalidRequest(
                f"the model's chat template cannot render this: {type(error).__name__}: {error}", param="messages"
            ) from error

    def shape(self, message: Message, index: int) -> Message:
        """The message with its content as this template takes it."""
        content = message.get("content")
        if isinstance(content, list):
            pictured = any(_is_image(part) for part in content)
            if pictured and not self.takes_parts:
                raise InvalidRequest(
                    "the model's chat template has no place for images", param=f"messages[{index}].content"
                )
            if pictured or (self.takes_parts and message.get("role") == "user"):
                return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
            # Templates that take a user's parts often read no more than the first of another role's.
            content = "\n".join(part["text"] for part in content if _has_text(part))
        if isinstance(content, str) and not self._takes_text:
            content = [{"type": "text", "text": content}]
        return {**message, "content": content} if "content" in message else message

    def _shows(self, content: Any, tools: list[dict[str, Any]] | None) -> bool:
        """Whether a user's text comes out, and not the list that it came in."""
        given = {"tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            prompt = self.render([{"role": "user", "content": content}], given, {})
        except InvalidRequest:
            return False
        return _SEEN in prompt and _UNSEEN not in prompt


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGES


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _marked(message: Message, param: str) -> tuple[str, Message]:
    """The text that ends a message, and the message with the mark behind it."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + _CUT}
    parts = list(content) if isinstance(content, list) else []
    for index, part in reversed(list(enumerate(parts))):
        if _has_text(part):
            parts[index] = {**part, "text": part["text"] + _CUT}
            return part["text"], {**message, "content": parts}
    raise InvalidRequest("the final message has no text to continue", param=param)


def _cut(prompt: str, text: str, param: str) -> str:
    """The prompt up to the mark; where the template trims the text, without blanks at its end."""
    at = prompt.rfind(_CUT.rstrip())
    if at < 0 or text.strip() not in prompt:
        raise InvalidRequest(
            "the model's chat template does not show the final message as it is, so that it cannot be continued",
            param=param,
        )
    return prompt[:at] if prompt.startswith(_CUT, at) else prompt[:at].rstrip()


def _with_reasoning(message: Message) -> Message:
    """Templates disagree on the name of an earlier turn's reasoning; whichever one is given, they find it."""
    for name in _REASONING_NAMES:
        reasoning = message.get(name)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template is broken: {error}") from error


def template_variables(source: str) -> frozenset[str]:
    """The names that a template reads and does not set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment.parse(source)))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the answers for training; here it only has to be understood."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that could lead a template to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        jinja2.utils.Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters, which no model has seen in its prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_dict
    )
    return environment


_environment = _make_environment()
