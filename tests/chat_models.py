"""Fake models with small chat templates: plain, with tools, with reasoning, and with images."""

from __future__ import annotations

from syringa.api.models.served_model import ServedModel
from syringa.output_formats import ModelFormats
from syringa.prompt.chat.template import ChatTemplate
from syringa.prompt.grammar.lark import LarkVocabulary
from tests.fake_engine import END, START, ByteTokenizer, fake_model

# Renders [s]instructions[u]question[a]answer.
PLAIN = """\
{%- for m in messages %}
{%- if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
{{- '[' ~ m.role[0] ~ ']' ~ m.content }}
{%- endfor %}{% if add_generation_prompt %}[a]{% endif %}"""

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN

TOOLS = """\
{%- if tools %}[tools]{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{{- '[' ~ m.role ~ (':' ~ m.name if m.name else '') ~ ']' }}
{%- if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' ~ call.function.name ~ call.function.arguments | tojson }}{% endfor %}
{%- if m.tool_call_id %}{{ '#' ~ m.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}\
{{ '<think></think>' }}{% endif %}{% endif %}"""

# Opens the reasoning itself, and reads an effort.
OPENING = """\
{%- for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content }}{% endfor -%}
[effort {{ reasoning_effort | default('free') }}][assistant]{{ '</think>' if thinking is false else '<think>' }}"""

VISION = """\
{%- for m in messages %}{{ '[' ~ m.role ~ ']' }}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor -%}
[assistant]"""


class ReasoningTokenizer(ByteTokenizer):
    """A tokenizer in which the reasoning markers are special tokens."""

    lark_vocabulary = LarkVocabulary({"<end>": END, "<start>": START, "<think>": 1, "</think>": 2})


def plain_model(source: str = PLAIN, **kwargs: object) -> ServedModel:
    return fake_model(template=ChatTemplate(source), **kwargs)


def tool_model(**kwargs: object) -> ServedModel:
    return fake_model(
        template=ChatTemplate(TOOLS), formats=ModelFormats(tool_calls="hermes", supports_tools=True), **kwargs
    )


def reasoning_model(source: str = TOOLS, **kwargs: object) -> ServedModel:
    formats = ModelFormats(tool_calls="hermes", supports_tools=True, reasoning="think")
    defaults = {"template": ChatTemplate(source), "formats": formats, "tokenizer": ReasoningTokenizer()}
    return fake_model(**(defaults | kwargs))


def vision_model(**kwargs: object) -> ServedModel:
    return fake_model(template=ChatTemplate(VISION), supports_images=True, **kwargs)
