"""Reads JSON while it is being written: a value, and a call that is an object with a name and arguments.

Character by character, so that it does not matter how the text is cut.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

BLANKS = " \t\n\r"
_CLOSES = {"{": "}", "[": "]"}
_WORD = frozenset("+-.0123456789eEtrufalsn")  # what numbers, true, false and null are written with
_STARTS = frozenset('{["-0123456789tfn')
_ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """One value, from its first character on. It sees where the value ends, and that it cannot be one; whether it is
    quite right is for whoever reads it."""

    def __init__(self, first: str) -> None:
        self.whole = False
        self.broken = first not in _STARTS
        self._first = first
        self._text = [first]  # not yet taken
        self._open = [_CLOSES[first]] if first in _CLOSES else []
        self._in_string = first == '"'
        self._escaped = False
        self._given = False  # whether arguments that are no object have been taken

    def feed(self, text: str, at: int = 0) -> int:
        """Reads on from `at`, up to the end of the value, and says how far it came."""
        while at < len(text) and not (self.whole or self.broken) and self.step(text[at]):
            at += 1
        return at

    def step(self, character: str) -> bool:
        """Takes a character; False if it is not of this value."""
        if self._in_string:
            self._step_in_string(character)
        elif not self._open and character not in _WORD:  # a number or a word: it has no end of its own
            self.whole = True
            return False
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
        elif character in "}]":
            if self._open.pop() != character:
                self.broken = True
                return False
            self.whole = not self._open
        elif character == '"':
            self._in_string = True
        elif character not in _WORD and character not in BLANKS and character not in ",:":
            self.broken = True
            return False
        self._text.append(character)
        return True

    def take(self) -> str:
        """What has been read since the last time."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_arguments(self) -> str:
        """The same, of a call's arguments: an object as the model writes it, and anything else once it is whole. A
        string of JSON comes unwrapped."""
        if self._first == "{":
            return self.take()
        if not self.whole or self._given:
            return ""
        self._given = True
        text = self.take()
        unwrapped = string(text)
        return "{}" if text == "null" or unwrapped == "" else text if unwrapped is None else unwrapped

    def _step_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.whole = not self._open


class _At(Enum):
    OPEN = auto()  # before the object
    KEY = auto()  # before a key, or the object's end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    COMMA = auto()  # after a value
    END = auto()


class CallReader:
    """`name` is set as soon as it is whole; `take` hands out what has been read of the arguments since, as the model
    wrote them. Arguments that come before the name wait for it. With `keys`, an object that has others before its name
    is no call."""

    def __init__(self, keys: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.broken = False  # this is no call
        self._keys = keys
        self._at = _At.OPEN
        self._key = ""
        self._value = JsonValue("{")  # the key or value at hand
        self._arguments: JsonValue | None = None
        self._told = False  # whether some of the arguments have been taken

    @property
    def done(self) -> bool:
        return self._at is _At.END

    def feed(self, text: str, at: int = 0) -> int:
        """Reads on from `at`, up to the end of the object or what breaks it, and says how far it came."""
        while at < len(text) and not (self.broken or self.done):
            if self._at is _At.IN_KEY or self._at is _At.IN_VALUE:
                at = self._value.feed(text, at)
                if self._value.whole:
                    self._end()
                self.broken = self.broken or self._value.broken
            elif self._step(text[at]):
                at += 1
        return at

    def take(self) -> str:
        """The arguments' text that is new; nothing before there is a name. A call without any has an empty object."""
        if self.name is None:
            return ""
        text = "" if self._arguments is None else self._arguments.take_arguments()
        if self.done and not self.broken and not (text or self._told):
            text = "{}"
        self._told = self._told or bool(text)
        return text

    def _step(self, character: str) -> bool:
        match self._at:
            case _ if character in BLANKS:
                pass
            case _At.OPEN if character == "{":
                self._at = _At.KEY
            case _At.KEY if character == '"':
                self._at, self._value = _At.IN_KEY, JsonValue(character)
            case _At.KEY | _At.COMMA if character == "}":
                self._at = _At.END
                self.broken = self.name is None
            case _At.COLON if character == ":":
                self._at = _At.VALUE
            case _At.VALUE if character in _STARTS:
                self._at, self._value = _At.IN_VALUE, JsonValue(character)
                if self._key in _ARGUMENTS and self._arguments is None:  # later ones are not of this call
                    self._arguments = self._value
            case _At.COMMA if character == ",":
                self._at = _At.KEY
            case _:
                self.broken = True
        return not self.broken

    def _end(self) -> None:
        """A key or a value is whole."""
        if self._at is _At.IN_KEY:
            self._key = string(self._value.take()) or ""
            self._at = _At.COLON
            self.broken = self.name is None and self._keys is not None and self._key not in self._keys
            return
        self._at = _At.COMMA
        if self._key == "name" and self.name is None:
            self.name = string(self._value.take()) or None
            self.broken = self.name is None
        elif self._key == "id" and self.id is None:
            self.id = string(self._value.take())


def string(text: str) -> str | None:
    """The value of a JSON string; None of anything else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, str) else None
