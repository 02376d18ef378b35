from __future__ import annotations

import pytest

from syringa.prompt.chat.template import ChatTemplate
from syringa.prompt.chat.template_capabilities import TemplateCapabilities, probe_template
from tests.chat_models import NO_SYSTEM, OPENING, PLAIN, TOOLS, VISION

NONE_ALONE = """{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}
{%- else %}{{ m.role ~ m.content }}{% endif %}{% endfor %}"""
PARTS = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
BOSS = "{% for m in messages %}{{ 'boss' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}"
TEXT_ARGUMENTS = """{% for m in messages %}{{ m.role }}{% if m.content is not none %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"""
PYTHON = """None {% for m in messages %}{{ m.role }}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"""
DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "system", "developer", "names", "empty", "as_text"),
    [
        (PLAIN, True, False, False, "", False),
        (NO_SYSTEM, False, False, False, "", False),
        (TOOLS, True, False, True, "", False),
        (OPENING, True, False, False, "", False),
        (VISION, True, False, False, "", False),
        (NONE_ALONE, True, False, False, None, False),
        (PARTS, True, False, False, "", False),
        (BOSS, True, True, False, "", False),
        (TEXT_ARGUMENTS, True, False, False, None, True),
        (PYTHON, True, False, False, "", True),
        (DEAF, False, False, False, "", False),
    ],
)
def test_probe_template_reports_capabilities(
    source: str, system: bool, developer: bool, names: bool, empty: str | None, as_text: bool
) -> None:
    assert probe_template(ChatTemplate(source)) == TemplateCapabilities(
        supports_system=system,
        supports_developer=developer,
        renders_names=names,
        empty_content=empty,
        arguments_as_text=as_text,
    )
