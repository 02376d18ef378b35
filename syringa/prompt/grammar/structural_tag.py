"""Structural tags: text that is free except between markers, as vLLM and xgrammar describe it.

There are two forms: xgrammar's tree of formats, and vLLM's older list of tags with the triggers that begin them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.lark import ANY_TEXT, LarkVocabulary, escape_slashes, string_literal
from syringa.types import Grammar

MAX_REPETITIONS = 1000
MAX_TRIGGERS = 64
MAX_SCHEMAS = 128
_NonEmpty = Annotated[str, Meta(min_length=1)]
_Nothing = Annotated[list[str], Meta(max_length=0)]  # xgrammar's `excludes`, which are not supported


class _Format(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class ConstString(_Format, tag="const_string"):
    value: str


class JsonSchemaContent(_Format, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class RegexContent(_Format, tag="regex"):
    pattern: str


class GrammarContent(_Format, tag="grammar"):
    grammar: str


class AnyText(_Format, tag="any_text"):
    excludes: _Nothing = []


class FormatSequence(_Format, tag="sequence"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class Or(_Format, tag="or"):
    elements: Annotated[list[Format], Meta(min_length=1)]


class OptionalContent(_Format, tag="optional"):
    content: Format


class Plus(_Format, tag="plus"):
    content: Format


class Star(_Format, tag="star"):
    content: Format


class Repeat(_Format, tag="repeat"):
    min: Annotated[int, Meta(ge=0, le=MAX_REPETITIONS)]
    max: Annotated[int, Meta(ge=-1, le=MAX_REPETITIONS)]
    content: Format


class Tag(_Format, tag="tag"):
    begin: str
    content: Format
    end: str | Annotated[list[_NonEmpty], Meta(min_length=1)]

    @property
    def ends(self) -> list[str]:
        """The texts one of which ends the tag; none if it ends with its content."""
        return ([self.end] if self.end else []) if isinstance(self.end, str) else self.end


class TriggeredTags(_Format, tag="triggered_tags"):
    triggers: Annotated[list[_NonEmpty], Meta(min_length=1, max_length=MAX_TRIGGERS)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Nothing = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchemaContent
    | RegexContent
    | GrammarContent
    | AnyText
    | FormatSequence
    | Or
    | OptionalContent
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)

FORMAT_NAMES = tuple(str(each.__struct_config__.tag) for each in get_args(Format))


class Structure(msgspec.Struct, kw_only=True):
    """A tag in vLLM's older form."""

    begin: str
    schema: dict[str, Any] | bool | None = None
    end: str


class StructuralTag(msgspec.Struct, kw_only=True):
    """Either `format`, or `structures` with `triggers`."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: Annotated[list[Structure], Meta(min_length=1)] | None = None
    triggers: Annotated[list[_NonEmpty], Meta(min_length=1, max_length=MAX_TRIGGERS)] | None = None


Reader = Callable[[Any, str], str]
"""Converts a schema or a grammar, given with its path in the request, to the text that a Lark grammar embeds."""


def structural_tag_grammar(
    tag: StructuralTag, path: str, vocabulary: LarkVocabulary, *, read_schema: Reader, read_grammar: Reader
) -> Grammar:
    """Return the grammar of a structural tag. Raises `InvalidRequest`, with a path below `path` as `param`."""
    if tag.format is not None:
        for name in ("structures", "triggers"):
            if getattr(tag, name) is not None:
                raise _invalid(f"{path}.{name}", "cannot be combined with format")
        builder = _Builder(vocabulary, read_schema, read_grammar)
        return builder.grammar(builder.compile(tag.format, f"{path}.format", (), last=True))
    if tag.structures is None or tag.triggers is None:
        raise _invalid(path, "expected format, or structures with triggers")
    tags = [
        Tag(begin=each.begin, content=JsonSchemaContent(json_schema=_schema_of(each)), end=each.end)
        for each in tag.structures
    ]
    format = TriggeredTags(triggers=tag.triggers, tags=tags)
    builder = _Builder(
        vocabulary,
        lambda schema, where: read_schema(schema, where.removesuffix(".content.json_schema") + ".schema"),
        read_grammar,
    )
    return builder.grammar(builder.triggered_tags(format, f"{path}.structures", (), last=True))


def _schema_of(structure: Structure) -> dict[str, Any] | bool:
    return True if structure.schema is None else structure.schema


class _Builder:
    def __init__(self, vocabulary: LarkVocabulary, read_schema: Reader, read_grammar: Reader) -> None:
        self._vocabulary = vocabulary
        self._read_schema, self._read_grammar = read_schema, read_grammar
        self._lines = [f"TEXT: {ANY_TEXT}"]
        self._nested: list[dict[str, str]] = []
        self._schemas = 0

    def grammar(self, start: str) -> Grammar:
        text = "\n".join([*self._lines, f"start: {start}"])
        if self._nested:
            return Grammar("llguidance", json.dumps({"grammars": [{"lark_grammar": text}, *self._nested]}))
        return Grammar("lark", text)

    def compile(self, format: Format, path: str, ends: Sequence[str], *, last: bool) -> str:
        """Return a Lark expression for the format with one of `ends` after it.

        `last`: without `ends`, nothing follows the format, so its text may go on to the end of the output.
        """
        match format:
            case ConstString():
                return self._with_end(self._vocabulary.literal(format.value), ends)
            case JsonSchemaContent():
                self._schemas += 1
                if self._schemas > MAX_SCHEMAS:
                    raise _invalid(path.removesuffix(".content"), f"at most {MAX_SCHEMAS} parts can have a schema")
                schema = self._read_schema(format.json_schema, f"{path}.json_schema")
                return self._with_end(f"%json {schema}", ends)
            case RegexContent():
                return self._regex(format.pattern, ends)
            case GrammarContent():
                name = f"grammar_{len(self._nested)}"
                text = self._read_grammar(format.grammar, f"{path}.grammar")
                self._nested.append({"name": name, "lark_grammar": text})
                return self._with_end(f"@{name}", ends)
            case AnyText():
                return self._free_text(path, ends, last=last)
            case FormatSequence():
                return self._sequence(format.elements, path, ends, last=last)
            case Or():
                parts = [
                    self.compile(each, f"{path}.elements[{index}]", ends, last=last)
                    for index, each in enumerate(format.elements)
                ]
                return f"( {' | '.join(parts)} )"
            case OptionalContent() | Star() | Plus() | Repeat():
                content = self.compile(format.content, f"{path}.content", (), last=False)
                return self._with_end(f"( {content} ){_repetitions(format, path)}", ends)
            case Tag():
                begin = self._vocabulary.literal(format.begin)
                return f"{begin} {self._tag_body(format, f'{path}.content', ends, last=last)}"
            case TriggeredTags():
                return self.triggered_tags(format, f"{path}.tags", ends, last=last)
            case TagsWithSeparator():
                return self._with_end(self._separated_tags(format, path), ends)

    def triggered_tags(self, format: TriggeredTags, path: str, ends: Sequence[str], *, last: bool) -> str:
        """Return a Lark expression for free text in which a trigger begins one of the tags. `path` is that of tags."""
        whole: list[str] = []
        by_trigger: dict[str, list[str]] = {}
        triggered: list[str] = []
        for index, tag in enumerate(format.tags):
            where = f"{path}[{index}]"
            trigger = min((each for each in format.triggers if tag.begin.startswith(each)), key=len, default=None)
            if trigger is None:
                raise _invalid(f"{where}.begin", "starts with none of the triggers")
            body = self._rule("body", self._tag_body(tag, f"{where}.content", (), last=False))
            whole.append(f"{self._vocabulary.literal(tag.begin)} {body}")
            rest = tag.begin[len(trigger) :]
            by_trigger.setdefault(trigger, []).append(f"{self._vocabulary.literal(rest)} {body}" if rest else body)
            before, special = self._vocabulary.split_at_special(tag.begin)
            if special and len(before) < len(trigger):  # the trigger ends within a special token
                triggered.append(f"{self._text_before(before)} {special} {body}")
        for trigger, tags in by_trigger.items():
            triggered.append(f"{self._text_until([trigger], spelled=True)} ( {' | '.join(tags)} )")
        first = f"( {' | '.join(whole)} )"
        if format.at_least_one and format.stop_after_first:
            return self._with_end(first, ends)
        free = self._free_text(path, ends, last=last)
        following = self._rule("triggered", " | ".join(triggered))
        if format.stop_after_first:
            return f"( {self._with_end(following, ends)} | {free} )"
        return f"{first} {following}* {free}" if format.at_least_one else f"{following}* {free}"

    def _separated_tags(self, format: TagsWithSeparator, path: str) -> str:
        tags = [self.compile(tag, f"{path}.tags[{index}]", (), last=False) for index, tag in enumerate(format.tags)]
        tag = self._rule("tag", " | ".join(tags))
        separator = self._vocabulary.literal(format.separator) if format.separator else ""
        more = "" if format.stop_after_first else f" ( {separator} {tag} )*"
        return f"( {tag}{more} )" + ("" if format.at_least_one else "?")

    def _tag_body(self, tag: Tag, path: str, ends: Sequence[str], *, last: bool) -> str:
        """Return a Lark expression for what follows the beginning of a tag. `path` is that of its content."""
        if not tag.ends:
            return self.compile(tag.content, path, ends, last=last)
        return self._with_end(self.compile(tag.content, path, tag.ends, last=False), ends)

    def _sequence(self, elements: Sequence[Format], path: str, ends: Sequence[str], *, last: bool) -> str:
        parts, index = [], 0
        while index < len(elements):
            each, where = elements[index], f"{path}.elements[{index}]"
            following = elements[index + 1] if index + 1 < len(elements) else None
            if following is None:
                parts.append(self.compile(each, where, ends, last=last))
            elif isinstance(following, ConstString) and following.value and not isinstance(each, ConstString):
                # As its end, so that a text or regular expression does not match it as well.
                tail = ends if index + 2 == len(elements) else ()
                parts.append(self._with_end(self.compile(each, where, [following.value], last=False), tail))
                index += 1
            else:
                parts.append(self.compile(each, where, (), last=False))
            index += 1
        return " ".join(parts)

    def _regex(self, pattern: str, ends: Sequence[str]) -> str:
        literals = [self._vocabulary.split_at_special(each) for each in ends]
        if any(special for _, special in literals):
            return self._with_end(self._rule("PATTERN", f"/{escape_slashes(pattern)}/"), ends)
        # One terminal with the end, which the regular expression might match as well.
        return self._rule("PATTERN", self._with_end(f"/{escape_slashes(pattern)}/", ends))

    def _free_text(self, path: str, ends: Sequence[str], *, last: bool) -> str:
        if ends:
            return self._text_until(ends)
        if not last:
            raise _invalid(path, "free text has to end with the end of a tag, a const_string or the output")
        return "TEXT"

    def _text_until(self, markers: Sequence[str], *, spelled: bool = False) -> str:
        """Return a rule for text up to and including the first of the markers.

        A marker that is a special token may also be spelled out; with `spelled`, it has to be.
        """
        literals = " | ".join(string_literal(each) for each in markers)
        found = [self._rule("until[lazy]", f"TEXT ( {literals} )")]
        for marker in () if spelled else markers:
            before, special = self._vocabulary.split_at_special(marker)
            if special:
                found.append(f"{self._text_before(before)} {special}")
        return self._rule("until", " | ".join(found)) if len(found) > 1 else found[0]

    def _text_before(self, text: str) -> str:
        """Return a terminal for any text that ends with the given one."""
        return self._rule("BEFORE", f"TEXT {string_literal(text)}") if text else "TEXT"

    def _with_end(self, expression: str, ends: Sequence[str]) -> str:
        literals = [self._vocabulary.literal(each) for each in ends]
        if len(literals) > 1:
            return f"{expression} ( {' | '.join(literals)} )"
        return " ".join([expression, *literals])

    def _rule(self, name: str, body: str) -> str:
        """Add a rule with a number after its name, and return its name."""
        name, bracket, attributes = name.partition("[")
        numbered = f"{name}_{len(self._lines)}"
        self._lines.append(f"{numbered}{bracket}{attributes}: {body}")
        return numbered


def _repetitions(format: OptionalContent | Star | Plus | Repeat, path: str) -> str:
    match format:
        case OptionalContent():
            return "?"
        case Star():
            return "*"
        case Plus():
            return "+"
    if -1 < format.max < format.min:
        raise _invalid(f"{path}.max", "expected at least min, or -1")
    return f"{{{format.min},{'' if format.max < 0 else format.max}}}"


def _invalid(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {reason}.", param=path)
