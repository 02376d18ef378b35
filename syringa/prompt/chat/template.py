"""Rendering of chat templates, character by character identical to transformers, without importing it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from syringa.errors import InvalidRequest, ModelError
from syringa.output_formats import ReasoningMarkers
from syringa.prompt.chat.template_capabilities import TemplateCapabilities, probe_role, probe_template

Message = dict[str, Any]

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_IMAGES = ("image", "image_url", "input_image")

# Appended to the text to continue, and searched for in the prompt. The space shows whether the template strips text.
_CONTINUATION_MARKER = "SYRINGA-CONTINUES-HERE "
_VISIBLE, _HIDDEN = "syringa-shows-this", "syringa-hides-this"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A function.", "parameters": {"type": "object", "properties": {}}},
}


class Template(Protocol):
    """A chat template, of a model or of a request."""

    source: str
    tool_source: str | None  # of a separate template for requests with tools

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, such as `tools`, or `enable_thinking` where reasoning can be turned off."""
        ...

    @property
    def capabilities(self) -> TemplateCapabilities: ...

    def supports_role(self, role: str) -> bool:
        """Return whether the template renders messages of a role."""
        ...

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
        """Return the prompt. Raises `InvalidRequest` if the template rejects the messages."""
        ...


class ChatTemplate:
    """A chat template, and the model's separate template for requests with tools, if it has one."""

    def __init__(
        self, source: str, special_tokens: dict[str, Any] | None = None, tool_source: str | None = None
    ) -> None:
        special = special_tokens or {}
        self.source, self.tool_source = source, tool_source
        self._plain = _CompiledTemplate(source, special)
        # With tools, even the same template may render messages differently.
        self._with_tools = _CompiledTemplate(tool_source or source, special, tools=[_TOOL])
        self.variables = template_variables(source) | template_variables(tool_source or "")
        self.supports_role = functools.lru_cache(maxsize=64)(functools.partial(probe_role, self))
        self.accepts_content_parts = self._plain.accepts_content_parts
        """Whether content may be a list of text and image parts; otherwise text parts are joined."""

    @functools.cached_property
    def capabilities(self) -> TemplateCapabilities:
        return probe_template(self)

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
        """Return the prompt, with the BOS token if the template writes it.

        `continue_final_message` leaves the last message open for the model to continue.
        """
        extra = kwargs or {}
        if not messages:
            raise InvalidRequest("there must be at least one message", param="messages")
        if reserved := _RESERVED & extra.keys():
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message, add_generation_prompt begins another: "
                "set only one of them",
                param="continue_final_message",
            )
        source = self._plain if tools is None else self._with_tools
        shaped = [_with_reasoning(source.shape(message, index)) for index, message in enumerate(messages)]
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return source.render(shaped, given, extra)
        param = f"messages[{len(shaped) - 1}].content"
        text, shaped[-1] = _append_marker(shaped[-1], param)
        return _cut_at_marker(source.render(shaped, given, extra), text, param)


def opens_reasoning(prompt: str, markers: ReasoningMarkers) -> bool:
    """Return whether a rendered prompt ends inside an open reasoning section.

    Only the end of the prompt counts: user messages may contain markers.
    """
    return prompt.rstrip().endswith(markers.begin.rstrip())


class _CompiledTemplate:
    """One compiled template, and the form in which it takes the content of messages.

    The form is found by rendering probes, because templates access content parts in too many ways to analyze.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> None:
        self._template = _compile(source)
        self._special_tokens = special_tokens
        self.accepts_content_parts = self._renders([{"type": "text", "text": _VISIBLE, _HIDDEN: _HIDDEN}], tools)
        self._accepts_text = not self.accepts_content_parts or self._renders(_VISIBLE, tools)

    def render(self, messages: list[Message], given: dict[str, Any], extra: dict[str, Any]) -> str:
        try:
            # As one dictionary: clients may use any name, including `self`.
            return self._template.render({**self._special_tokens, **extra, **given, "messages": messages})
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template rejects these messages: {error}", param="messages") from error
        except Exception as error:
            # A message of an unexpected form can raise any exception in a template.
            raise InvalidRequest(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def shape(self, message: Message, index: int) -> Message:
        """Return the message with its content in the form that this template takes."""
        content = message.get("content")
        if isinstance(content, list):
            has_images = any(_is_image(part) for part in content)
            if has_images and not self.accepts_content_parts:
                raise InvalidRequest("the chat template does not support images", param=f"messages[{index}].content")
            if has_images or (self.accepts_content_parts and message.get("role") == "user"):
                return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
            # Templates that take content parts of users often read only the first part of other roles.
            content = "\n".join(part["text"] for part in content if _has_text(part))
        if isinstance(content, str) and not self._accepts_text:
            content = [{"type": "text", "text": content}]
        return {**message, "content": content} if "content" in message else message

    def _renders(self, content: Any, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the text of a user message is rendered, and not the list around it."""
        given = {"tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            prompt = self.render([{"role": "user", "content": content}], given, {})
        except InvalidRequest:
            return False
        return _VISIBLE in prompt and _HIDDEN not in prompt


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGES


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _append_marker(message: Message, param: str) -> tuple[str, Message]:
    """Return the final text of a message, and the message with the continuation marker after it."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + _CONTINUATION_MARKER}
    parts = list(content) if isinstance(content, list) else []
    for index, part in reversed(list(enumerate(parts))):
        if _has_text(part):
            parts[index] = {**part, "text": part["text"] + _CONTINUATION_MARKER}
            return part["text"], {**message, "content": parts}
    raise InvalidRequest("the final message has no text to continue", param=param)


def _cut_at_marker(prompt: str, text: str, param: str) -> str:
    """Return the prompt up to the marker, without trailing whitespace if the template strips text."""
    at = prompt.rfind(_CONTINUATION_MARKER.rstrip())
    if at < 0 or text.strip() not in prompt:
        raise InvalidRequest(
            "the chat template changes the final message, so it cannot be continued",
            param=param,
        )
    return prompt[:at] if prompt.startswith(_CONTINUATION_MARKER, at) else prompt[:at].rstrip()


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under all names that templates use."""
    for name in _REASONING_NAMES:
        reasoning = message.get(name)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template is invalid: {error}") from error


def template_variables(source: str) -> frozenset[str]:
    """Return the names that a template reads and does not set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment.parse(source)))


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks assistant text for training and is ignored here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Namespace that rejects names through which a template could reach Python internals."""

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
    # Jinja's own filter escapes HTML characters, which models do not see in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_dict
    )
    return environment


_environment = _make_environment()
