from __future__ import annotations

from typing import Any

import pytest

from syringa.errors import InvalidRequest, ModelError
from syringa.modelfiles import describe, locate
from syringa.prompt.chat.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

INSTRUCT = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
[INST] {{ message['content'] | trim }} [/INST]{% elif message['role'] == 'assistant' %}
{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% elif message['role'] == 'tool' %}{% continue %}{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

TOOLS = """{%- set ns = namespace(last=-1, seen=false) %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>' }}
    {{- tools | tojson(indent=2) }}{{ tools[0].function | tojson(separators=(',', ':'), sort_keys=true) }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' and not ns.seen %}{%- set ns.seen = true %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<call>' ~ call.function.name ~ call.function.arguments | tojson ~ '</call>' }}
        {%- endfor %}
    {%- elif message.content is string %}
        {{- message.role ~ ': ' ~ message.content.strip() }}
    {%- else %}
        {%- for part in message.content if part.type == 'text' %}{{ part.text }}{%- endfor %}
    {%- endif %}
    {%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {%- if message.thinking %}{{ '<analysis>' + message.thinking }}{% endif %}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}{% break %}{%- endfor %}
{%- set d = dict(a=1) %}{{- d.a ~ ns.last }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}
{{- strftime_now('%Y') }} {{ undefined_thing }}{{ unk_token }}"""

TOOL = {
    "type": "function",
    "function": {"name": "größe", "description": "<b> & 'x' \"y\"", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"function": {"name": "f", "arguments": {"x": "ü<", "n": [1, 2.5, None, True]}}}

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    (CHATML, [{"role": "user", "content": "Hi <b> ü"}], {"add_generation_prompt": True}),
    (CHATML, [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}], {}),
    (INSTRUCT, [{"role": "user", "content": "  a "}, {"role": "assistant", "content": "b"}], {}),
    (INSTRUCT, [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], {"bos_token": "[own]"}),
    (TOOLS, [{"role": "user", "content": " a "}], {"tools": [TOOL]}),
    (TOOLS, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}], {}),
    (TOOLS, [{"role": "assistant", "content": "a", "reasoning": "why"}], {"enable_thinking": False}),
    (
        TOOLS,
        [{"role": "assistant", "content": "a", "thinking": "why"}],
        {"documents": [{"title": "T"}, {"title": "U"}]},
    ),
    (TOOLS, [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]}], {"tools": []}),
]


@pytest.mark.parametrize("case", CASES)
def test_render_matches_transformers(
    transformers_tokenizer: Any, case: tuple[str, list[dict[str, Any]], dict[str, Any]]
) -> None:
    source, messages, options = case
    known = {key: options.get(key) for key in ("tools", "documents")}
    generation = options.get("add_generation_prompt", False)
    extra = {key: value for key, value in options.items() if key not in (*known, "add_generation_prompt")}
    ours = ChatTemplate(source, SPECIAL).render(messages, **known, add_generation_prompt=generation, kwargs=extra)
    assert ours == transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=generation, **known, **extra
    )
    assert ours


def test_render_of_the_default_model_matches_transformers(transformers_tokenizer: Any) -> None:
    description = describe(locate("default"))
    assert description.chat_template is not None
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    ours = ChatTemplate(description.chat_template, description.special_tokens).render(messages)
    assert ours == transformers_tokenizer.apply_chat_template(
        messages, chat_template=description.chat_template, tokenize=False, add_generation_prompt=True
    )


def test_separate_tool_template_is_used_with_tools() -> None:
    template = ChatTemplate("plain", {}, "with {{ tools | length }}")
    assert template.render([{"role": "user"}]) == "plain"
    assert template.render([{"role": "user"}], tools=[TOOL]) == "with 1"
    assert template.variables == {"tools"}
    assert "enable_thinking" in ChatTemplate(TOOLS).variables


def test_render_does_not_modify_messages() -> None:
    messages = [{"role": "assistant", "content": "a", "reasoning": "why"}]
    ChatTemplate("{{ messages[0].reasoning_content }}").render(messages)
    assert messages == [{"role": "assistant", "content": "a", "reasoning": "why"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (INSTRUCT, "Only user and assistant roles"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.deeper }}", "has no attribute"),
        ("{{ messages.append(1) }}", "rejects"),
        ("{{ ''.__class__.__mro__ }}", "rejects"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent='a' * 3) }}{{ messages | tojson | from }}", None),
        ("{% for x in y %}", None),
    ],
)
def test_template_errors_become_request_or_model_errors(source: str, message: str | None) -> None:
    if message is None:
        with pytest.raises(ModelError, match="template is invalid"):
            ChatTemplate(source)
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(source).render([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_render_rejects_empty_messages_and_reserved_kwargs() -> None:
    template = ChatTemplate("x")
    with pytest.raises(InvalidRequest, match="at least one message"):
        template.render([])
    with pytest.raises(InvalidRequest, match="cannot set messages") as caught:
        template.render([{"role": "user"}], kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"
