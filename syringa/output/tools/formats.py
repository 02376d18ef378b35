"""Registry of the tool-call parsers, by format name. Add the parser of a new tool-call format here.

Three parsers are driven by data: `JsonToolParser` (calls are JSON objects), `DelimitedToolParser` (markers between name
and arguments) and `TaggedToolParser` (a tag for each argument). The markers that grammars need too are in
`syringa.output_formats`. Harmony is parsed by `output.harmony`, since its messages carry reasoning and text as well.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from functools import partial

from syringa.output.tools.base import ToolCallParser, ToolSchemas
from syringa.output.tools.delimited import DelimitedToolParser
from syringa.output.tools.gemma import GemmaToolParser
from syringa.output.tools.json_objects import JsonCallFormat, JsonToolParser
from syringa.output.tools.tagged import TaggedToolParser
from syringa.output_formats import DELIMITED_FORMATS, GEMMA_FORMATS, TAGGED_FORMATS, ToolCallFormat

_MISTRAL_CALL_ID = "[CALL_ID]"
_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.*?)(:\d+)?")


def _mistral_id(own: str | None) -> str:
    """Return the model's own id, or a new one: Mistral's templates accept only nine letters and digits."""
    if own is not None and _MISTRAL_ID.fullmatch(own):
        return own
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _mistral_head(head: str, calls: int) -> tuple[str, str]:
    """Parse `name` or `name[CALL_ID]id`."""
    name, _, id = head.partition(_MISTRAL_CALL_ID)
    return name.strip(), _mistral_id(id.strip())


def _kimi_head(head: str, calls: int) -> tuple[str, str]:
    """Parse `functions.name:0`. The id is kept, because Kimi's template repeats it before the function's result."""
    found = _KIMI_HEAD.fullmatch(head.strip())
    name, number = found.groups() if found else ("", None)
    return name, f"functions.{name}{number or f':{calls}'}"


_HERMES = JsonCallFormat(begin="<tool_call>", end="</tool_call>")
# No marker distinguishes a Llama 3 call from an answer in JSON: it must start like a call and name a known function.
_LLAMA3 = JsonCallFormat(
    separator=";,",
    tag="<|python_tag|>",
    keys=frozenset({"type", "name", "parameters", "arguments"}),
    known_functions_only=True,
)
# The model's id is kept only if it precedes the name: the start of a call is emitted with its id.
_MISTRAL = JsonCallFormat(begin="[TOOL_CALLS]", opening="[", separator=",", end="]", call_id=_mistral_id)

_PARSERS: dict[ToolCallFormat, Callable[[int, ToolSchemas], ToolCallParser]] = {
    "plain": partial(JsonToolParser, _HERMES),
    "hermes": partial(JsonToolParser, _HERMES),
    "llama3": partial(JsonToolParser, _LLAMA3),
    "mistral": partial(JsonToolParser, _MISTRAL),
    # Some models leave out `[ARGS]`.
    "mistral-args": partial(
        DelimitedToolParser,
        DELIMITED_FORMATS["mistral-args"],
        name_ends=("[ARGS]", "{"),
        inner_markers=(_MISTRAL_CALL_ID,),
        parse_head=_mistral_head,
    ),
    # The begin marker consists of two special tokens and a word.
    "deepseek": partial(
        DelimitedToolParser,
        DELIMITED_FORMATS["deepseek"],
        name_ends=("\n", "```", "{"),
        inner_markers=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    "deepseek-v3.1": partial(DelimitedToolParser, DELIMITED_FORMATS["deepseek-v3.1"]),
    "kimi": partial(DelimitedToolParser, DELIMITED_FORMATS["kimi"], parse_head=_kimi_head),
    **{name: partial(TaggedToolParser, format) for name, format in TAGGED_FORMATS.items()},
    **{name: partial(GemmaToolParser, format) for name, format in GEMMA_FORMATS.items()},
}


def create_tool_parser(format: ToolCallFormat, choice: int, schemas: ToolSchemas) -> ToolCallParser:
    """Return a new parser for one choice."""
    return _PARSERS[format](choice, schemas)
