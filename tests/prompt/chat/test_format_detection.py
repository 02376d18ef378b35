"""Format detection on small templates with the markers of each model family."""

from __future__ import annotations

import pytest

from syringa.output_formats import REASONING_MARKERS, TOOL_CALL_FORMATS, ModelFormats, ReasoningFormat, ToolCallFormat
from syringa.prompt.chat.format_detection import accepts_tools, detect_formats, resolve_formats
from syringa.prompt.chat.template import ChatTemplate

TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"

HERMES = (
    TOOLS
    + r"""{{ "Answer with <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}"""
    + TURNS
    + CALLS
    + r"""{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    + END
)
QWEN3 = HERMES + (
    "{% for m in messages %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>{% endif %}"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN_CODER = (
    TOOLS
    + TURNS
    + CALLS
    + (
        r"{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments | items %}"
        r"{{- '<parameter=' + k + '>\n' ~ v ~ '\n</parameter>\n' }}{% endfor %}{{- '</function>\n</tool_call>' }}" + END
    )
)
GLM = (
    "[gMASK]<sop>" + TOOLS + "{% for m in messages %}<|{{ m.role }}|>\n<think></think>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}" + TOOLS + "{% for m in messages %}<｜User｜>{{ m.content }}{% for c in m.tool_calls or [] %}"
    r"{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' ~"
    r" c.function.arguments ~ '\n```<｜tool▁call▁end｜>' }}"
    "{% endfor %}{% endfor %}"
)
DEEPSEEK_R1 = DEEPSEEK + r"{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
DEEPSEEK_V31 = (
    "{{ bos_token }}" + TOOLS + "{% for m in messages %}<｜User｜>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' ~ c.function.arguments ~"
    " '<｜tool▁call▁end｜>' }}{% endfor %}{% endfor %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}"
)
DEEPSEEK_V32 = (
    '{% set dsml = "｜DSML｜" %}' + TOOLS + "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<{{ dsml }}function_calls><{{ dsml }}invoke name="{{ c.function.name }}">'
    "{% for k, v in c.function.arguments.items() %}"
    '<{{ dsml }}parameter name="{{ k }}" string="true">{{ v }}</{{ dsml }}parameter>{% endfor %}'
    "{% endfor %}{% endfor %}<｜Assistant｜><think>"
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    + CALLS
    + (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>" + END
    )
)
KIMI_THINKING = KIMI + "<|im_assistant|>assistant<|im_middle|><think></think>"
MINIMAX = (
    "{% set begin = '<minimax:tool_call>' %}]~b]system\n"
    + TOOLS
    + CALLS
    + (
        """{{ begin + '<invoke name="' + c.function.name + '">' }}{% for k, v in c.function.arguments | items %}"""
        """{{ '<parameter name="' + k + '">' ~ v }}</parameter>{% endfor %}</invoke>""" + END
    )
    + "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + CALLS
    + (
        '{{ "[TOOL_CALLS] [" + (c.function | tojson) + "]" }}'
        + END
        + "{% for m in messages %}[INST] {{ m.content }}[/INST]"
        "{% endfor %}"
    )
)
MISTRAL_ARGS = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + CALLS
    + ("{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}" + END)
)
MAGISTRAL = MISTRAL_ARGS + "{% for m in messages %}{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' }}{% endfor %}"
GEMMA = (
    "{% for t in tools or [] %}<|turn>system\n<|tool>declaration:{{ t.function.name }}<tool|>{% endfor %}"
    + CALLS
    + "{{- '<|tool_call>call:' + c.function.name + '{}<tool_call|>' -}}"
    + END
    + r"{% if add_generation_prompt %}{{ '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}"
)
FUNCTION_GEMMA = (
    "{% for t in tools or [] %}<start_function_declaration>declaration:{{ t.function.name }}<end_function_declaration>"
    "{% endfor %}" + CALLS + "<start_function_call>call:{{ c.function.name }}{}<end_function_call>" + END
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    + CALLS
    + (
        """{{- "<|start|>assistant to=" }}{{- "functions." + c.function.name + "<|channel|>commentary " }}"""
        """{{- "json<|message|>" }}{{- c.function.arguments | tojson }}{{- "<|call|>" }}""" + END
    )
    + "{% for m in messages %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endfor %}"
)
LLAMA3 = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools is not none %}Environment: ipython\n{{ tools | tojson(indent=4) }}{% endif %}"
    + CALLS
    + (
        """{{ '{"name": "' + c.function.name + '", ' }}{{ '"parameters": ' }}{{ c.function.arguments | tojson }}"""
        + END
    )
)
LLAMA32 = (
    "<|start_header_id|>user<|end_header_id|>\n\n{% if tools %}"
    r"""{{ "Reply with {\"name\": function name, \"parameters\": its arguments}" }}{{ tools | tojson }}{% endif %}"""
)

FAMILIES: list[tuple[str, ToolCallFormat, ReasoningFormat | None]] = [
    (HERMES, "hermes", None),
    (QWEN3, "hermes", "think"),
    (QWEN_CODER, "qwen-coder", None),
    (GLM, "glm", "think"),
    (DEEPSEEK, "deepseek", None),
    (DEEPSEEK_R1, "deepseek", "think"),
    (DEEPSEEK_V31, "deepseek-v3.1", "think"),
    (DEEPSEEK_V32, "deepseek-dsml", "think"),
    (KIMI, "kimi", None),
    (KIMI_THINKING, "kimi", "think"),
    (MINIMAX, "minimax", "think"),
    (MISTRAL, "mistral", None),
    (MISTRAL_ARGS, "mistral-args", None),
    (MAGISTRAL, "mistral-args", "mistral"),
    (GEMMA, "gemma", "gemma"),
    (FUNCTION_GEMMA, "function-gemma", None),
    (HARMONY, "harmony", "harmony"),
    (LLAMA3, "llama3", None),
    (LLAMA32, "llama3", None),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), FAMILIES)
def test_detect_formats_of_model_families(
    template: str, calls: ToolCallFormat, reasoning: ReasoningFormat | None
) -> None:
    ChatTemplate(template).render([{"role": "user", "content": "Hi"}])  # must be a valid template
    assert detect_formats(template, None, ()) == ModelFormats(
        tool_calls=calls, reasoning=reasoning, supports_tools=True
    )


def test_every_format_is_detected_in_some_template() -> None:
    assert {calls for _, calls, _ in FAMILIES} | {"plain"} == set(TOOL_CALL_FORMATS)
    assert {thought for _, _, thought in FAMILIES} | {"kimi-vl"} == {*REASONING_MARKERS, None}


@pytest.mark.parametrize(
    ("tokens", "reasoning"),
    [
        (["<tool_call>", "<|im_end|>"], None),  # Qwen 2.5
        (["<think>", "</think>", "<tool_call>"], "think"),
        (["[THINK]", "[/THINK]", "[INST]"], "mistral"),
        (["◁think▷", "◁/think▷"], "kimi-vl"),
        (["<|channel|>", "<|message|>"], "harmony"),
        (["<|channel>", "<channel|>"], "gemma"),
        (["<|think|>", "<seed:think>"], None),
    ],
)
def test_reasoning_format_is_detected_from_added_tokens(tokens: list[str], reasoning: ReasoningFormat | None) -> None:
    assert detect_formats(TURNS, None, tokens).reasoning == reasoning
    assert detect_formats(None, None, tokens) == ModelFormats(reasoning=reasoning)


def test_template_takes_precedence_over_the_vocabulary() -> None:
    # The first Magistral uses <think>, and its vocabulary has tokens for another marker.
    assert detect_formats(MISTRAL + "<think>", None, ["[THINK]"]).reasoning == "think"


def test_template_that_strips_earlier_reasoning_is_detected() -> None:
    template = TURNS + "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert detect_formats(template, None, ()).reasoning == "think"


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        DEEPSEEK.replace(TOOLS, ""),  # as published by DeepSeek: renders earlier calls, but no tools
        TOOLS + TURNS + "<TOOLCALL>[]</TOOLCALL>",  # an unknown format
        TOOLS + "<seed:tool_call><function=f><parameter=p></parameter></function></seed:tool_call>",
        TOOLS + "<|start_header_id|>",
        "{% for tool in messages[0].tools %}<tool_call>{% endfor %}",
        None,
    ],
)
def test_templates_without_a_known_tool_format_use_plain(template: str | None) -> None:
    assert detect_formats(template, None, ["<tool_call>"]) == ModelFormats(tool_calls="plain", supports_tools=False)


def test_separate_tool_template_is_considered() -> None:
    assert detect_formats(TURNS, HERMES, ()) == ModelFormats(tool_calls="hermes", supports_tools=True)
    assert detect_formats(TURNS, HERMES.replace(TOOLS, ""), ()) == ModelFormats()


def test_accepts_tools_ignores_a_variable_that_the_template_always_sets() -> None:
    assert accepts_tools("{% if custom %}{% set tools = custom %}{% endif %}{{ tools }}", None)
    assert not accepts_tools("{% set tools = [] %}{{ tools }}", None)


def test_resolve_formats_prefers_explicit_formats() -> None:
    assert resolve_formats(QWEN3, None, ()) == detect_formats(QWEN3, None, ())
    assert resolve_formats(QWEN3, None, (), tool_calls="glm", reasoning="mistral") == ModelFormats(
        tool_calls="glm", reasoning="mistral", supports_tools=True
    )
    assert resolve_formats(QWEN3, None, (), reasoning="none") == ModelFormats(tool_calls="hermes", supports_tools=True)
    assert resolve_formats(QWEN3, None, (), tool_calls="plain").supports_tools is False
    # A template that accepts tools in a format that is not detected.
    unknown = TOOLS + "<TOOLCALL>"
    assert resolve_formats(unknown, None, (), tool_calls="hermes") == ModelFormats(
        tool_calls="hermes", supports_tools=True
    )
    assert resolve_formats(TURNS, None, (), tool_calls="hermes") == ModelFormats(
        tool_calls="hermes", supports_tools=False
    )
