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

Message = dict[str, Any]

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template, and where the model has one, its other template for requests with tools."""

    def __init__(
        self, source: str, special_tokens: dict[str, Any] | None = None, tool_source: str | None = None
    ) -> None:
        self._special_tokens = special_tokens or {}
        self._template = _compile(source)
        self._tool_template = _compile(tool_source) if tool_source else self._template
        self.variables = _variables(source) | _variables(tool_source or "")
        """The names that the template reads: `tools` where it knows tools, `enable_thinking` where thinking can be
        turned off."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. It begins with the model's first token where the template writes it: do not add it again."""
        extra = kwargs or {}
        if not messages:
            raise InvalidRequest("there must be at least one message", param="messages")
        if taken := _RESERVED & extra.keys():
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        template = self._template if tools is None else self._tool_template
        try:
            return template.render(
                **{**self._special_tokens, **extra},
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error
        except Exception as error:
            # What a template does with a message of an unexpected shape can fail in any way that Python can.
            raise InvalidRequest(
                f"the model's chat template cannot render this: {type(error).__name__}: {error}", param="messages"
            ) from error


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
        raise ModelError(f"the model's chat template is broken: {error}") from error


def _variables(source: str) -> frozenset[str]:
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
