"""The form of messages passed to a template, and the end of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.output_formats import REASONING_MARKERS
from syringa.prompt.chat.template import ChatTemplate, opens_reasoning
from tests.prompt.chat.test_template import CALL, CHATML, INSTRUCT, SPECIAL, TOOL, TOOLS

# A vision template with content parts, and a template that accepts nothing else.
VISION = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARTS_ONLY = """{% for message in messages %}{{ message.role | capitalize }}:
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}"""
IN_A_MACRO = """{% macro visible(content) %}{% if content is string %}{{ content }}{% else %}
{%- for item in content %}{{ item.text }}{% endfor %}{% endif %}{% endmacro %}
{% for m in messages %}<|{{ m.role }}|>{{ visible(m.content) }}{% endfor %}"""
TRIMS = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}"""

CHAT = [{"role": "user", "content": "Tell me."}]
TEXT, PICTURE = {"type": "text", "text": "part"}, {"type": "image_url", "image_url": {"url": "data:secret"}}


@pytest.mark.parametrize("source", [CHATML, INSTRUCT, TOOLS, VISION, PARTS_ONLY, IN_A_MACRO, TRIMS])
@pytest.mark.parametrize(
    "content", ["Once upon", " Once upon a time, ", "a\n\nb\n", "", "Tell me.", "{{ x }} <|im_end|> ü"]
)
def test_continue_final_message_matches_transformers(transformers_tokenizer: Any, source: str, content: str) -> None:
    final: Any = [{"type": "text", "text": content}] if source == PARTS_ONLY else content
    messages = [*CHAT, {"role": "assistant", "content": final}]
    if source == PARTS_ONLY:
        messages[0] = {"role": "user", "content": [{"type": "text", "text": "Tell me."}]}
    ours = ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert ours.endswith(content) or source in (TOOLS, TRIMS)
    assert messages[-1]["content"] == final


def test_continue_final_message_continues_the_last_text_part(transformers_tokenizer: Any) -> None:
    parts = [TEXT, {"type": "text", "text": "and more"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}]
    ours = ChatTemplate(VISION).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == transformers_tokenizer.apply_chat_template(
        messages, chat_template=VISION, tokenize=False, continue_final_message=True
    )
    assert ours.endswith("partand more")


@pytest.mark.parametrize(
    ("source", "message", "message_text"),
    [
        (CHATML, {"role": "assistant"}, "no text to continue"),
        (CHATML, {"role": "assistant", "content": None}, "no text to continue"),
        (VISION, {"role": "user", "content": [PICTURE]}, "no text to continue"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "Once"}, "changes the final message"),
        (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
            {"role": "assistant", "content": "<think>hm</think>Once"},
            "changes the final message",
        ),
    ],
)
def test_continue_final_message_rejects_messages_it_cannot_continue(
    source: str, message: dict[str, Any], message_text: str
) -> None:
    with pytest.raises(InvalidRequest, match=message_text) as caught:
        ChatTemplate(source).render([*CHAT, message], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "messages[1].content"


def test_continue_final_message_excludes_add_generation_prompt() -> None:
    with pytest.raises(InvalidRequest, match="set only one of them") as caught:
        ChatTemplate(CHATML).render(CHAT, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "accepts_content_parts"),
    [
        (CHATML, False),
        (INSTRUCT, False),
        (TRIMS, False),
        ("{{ messages | tojson }}", False),
        ("{{ raise_exception('never') }}", False),
        (TOOLS, True),
        (VISION, True),
        (PARTS_ONLY, True),
        (IN_A_MACRO, True),
    ],
)
def test_template_detects_support_for_content_parts(source: str, accepts_content_parts: bool) -> None:
    assert ChatTemplate(source, SPECIAL).accepts_content_parts is accepts_content_parts


def test_content_parts_are_passed_to_templates_that_accept_them() -> None:
    messages = [{"role": "user", "content": [TEXT, PICTURE, {"type": "text", "text": "!"}]}]
    prompt = ChatTemplate(VISION).render(messages)
    assert "part<|vision_start|><|image_pad|><|vision_end|>!<|im_end|>" in prompt
    assert "secret" not in prompt
    assert messages[0]["content"][1] is PICTURE


def test_content_parts_are_joined_for_text_templates() -> None:
    prompt = ChatTemplate(CHATML).render([{"role": "user", "content": [TEXT, {"type": "text", "text": "two"}]}])
    assert "user\npart\ntwo<|im_end|>" in prompt


def test_text_is_wrapped_for_templates_that_accept_only_parts() -> None:
    assert ChatTemplate(PARTS_ONLY).render(CHAT) == "User:Tell me.<end_of_utterance>\n"


def test_content_parts_of_other_roles_are_joined() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}{% for part in m.content %}"
        "{{ part.text }}{% endfor %}{% else %}{{ m.content | string }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": [TEXT]}, {"role": "tool", "content": [TEXT, TEXT]}]
    assert ChatTemplate(source).render(messages) == "partpart\npart"


def test_text_template_rejects_images() -> None:
    with pytest.raises(InvalidRequest, match="does not support images") as caught:
        ChatTemplate(CHATML).render([*CHAT, {"role": "user", "content": [TEXT, PICTURE]}])
    assert caught.value.param == "messages[1].content"


def test_template_may_accept_only_text_with_tools() -> None:
    source = "{% if tools %}{{ messages[0].content | trim }}{% else %}" + VISION + "{% endif %}"
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": [TEXT, TEXT]}]
    assert template.accepts_content_parts
    assert template.render(messages, tools=[TOOL]) == "part\npart"
    assert "partpart<|im_end|>" in template.render(messages)


def test_tool_call_arguments_are_objects() -> None:
    source = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}"
        "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}{% endfor %}"
        "{% for k, v in c.function.arguments | dictsort %} {{ k }}{% endfor %}{% endfor %}"
    )
    prompt = ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert prompt == '{"x": "ü<", "n": [1, 2.5, null, true]} x=ü< n=[1, 2.5, None, True] x n n x'


@pytest.mark.parametrize(
    ("prompt", "format", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "think", True),
        ("<｜Assistant｜><think>", "think", True),
        ("<|im_start|>assistant\n", "think", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "think", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", "think", False),
        ("</think>a<think> ", "think", True),
        ("[/INST][THINK]", "mistral", True),
        ("<|turn>model\n<|channel>thought\n", "gemma", True),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma", False),
        ("<|start|>assistant", "harmony", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", True),
        ("", "think", False),
    ],
)
def test_opens_reasoning_checks_the_end_of_the_prompt(prompt: str, format: Any, opened: bool) -> None:
    assert opens_reasoning(prompt, REASONING_MARKERS[format]) is opened
