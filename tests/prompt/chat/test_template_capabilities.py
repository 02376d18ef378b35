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
FIRST = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}\
{{ m.role ~ m.content }}{% endfor %}"
# Rejects a system message only if an assistant's follows.
EVEN = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}\
{% endif %}{{ m.role ~ m.content }}{% endfor %}"
DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "system", "late", "developer", "names", "empty", "as_text"),
    [
        (FIRST, True, False, False, False, "", False),
        (EVEN, False, False, False, False, "", False),
        (PLAIN, True, True, False, False, "", False),
        (NO_SYSTEM, False, True, False, False, "", False),
        (TOOLS, True, True, False, True, "", False),
        (OPENING, True, True, False, False, "", False),
        (VISION, True, True, False, False, "", False),
        (NONE_ALONE, True, True, False, False, None, False),
        (PARTS, True, True, False, False, "", False),
        (BOSS, True, True, True, False, "", False),
        (TEXT_ARGUMENTS, True, True, False, False, None, True),
        (PYTHON, True, True, False, False, "", True),
        (DEAF, False, False, False, False, "", False),
    ],
)
def test_probe_template_reports_capabilities(
    source: str, system: bool, late: bool, developer: bool, names: bool, empty: str | None, as_text: bool
) -> None:
    assert probe_template(ChatTemplate(source)) == TemplateCapabilities(
        supports_system=system,
        supports_late_system=late,
        supports_developer=developer,
        renders_names=names,
        empty_content=empty,
        arguments_as_text=as_text,
    )
