"""Incremental readers of JSON: a value, and a tool call that is an object with a name and arguments.

They read character by character, so the result does not depend on how the text is split.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

WHITESPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_LITERAL = frozenset("+-.0123456789eEtrufalsn")  # characters of numbers, true, false and null
_VALUE_STARTS = frozenset('{["-0123456789tfn')
_ARGUMENTS = ("arguments", "parameters")


class JsonValueReader:
    """Reader of one value from its first character on.

    It finds the end of the value and rejects what cannot be JSON; the value is not fully validated.
    """

    def __init__(self, first: str) -> None:
        self.complete = False
        self.broken = first not in _VALUE_STARTS
        self._first = first
        self._text = [first]  # not taken yet
        self._open = [_CLOSERS[first]] if first in _CLOSERS else []
        self._in_string = first == '"'
        self._escaped = False
        self._arguments_taken = False  # for arguments that are no object

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` up to the end of the value, and return the position reached."""
        while at < len(text) and not (self.complete or self.broken) and self._step(text[at]):
            at += 1
        return at

    def take(self) -> str:
        """Return the text read since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_arguments(self) -> str:
        """Like `take`, for the arguments of a call.

        An object is returned as it is written, any other value once it is complete. A JSON string is unwrapped.
        """
        if self._first == "{":
            return self.take()
        if not self.complete or self._arguments_taken:
            return ""
        self._arguments_taken = True
        text = self.take()
        unwrapped = decode_string(text)
        return "{}" if text == "null" or unwrapped == "" else text if unwrapped is None else unwrapped

    def _step(self, character: str) -> bool:
        """Consume a character; return False if it is not part of this value."""
        if self._in_string:
            self._step_in_string(character)
        elif not self._open and character not in _LITERAL:  # a number or literal has no end marker of its own
            self.complete = True
            return False
        elif character in _CLOSERS:
            self._open.append(_CLOSERS[character])
        elif character in "}]":
            if self._open.pop() != character:
                self.broken = True
                return False
            self.complete = not self._open
        elif character == '"':
            self._in_string = True
        elif character not in _LITERAL and character not in WHITESPACE and character not in ",:":
            self.broken = True
            return False
        self._text.append(character)
        return True

    def _step_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.complete = not self._open


class _Position(Enum):
    OPEN = auto()  # before the object
    KEY = auto()  # before a key, or the object's end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    COMMA = auto()  # after a value
    END = auto()


class JsonCallReader:
    """Reader of a call object.

    `name` is set as soon as it is complete; `take` then returns the arguments as the model writes them. Arguments that
    come before the name are held until it is known. With `keys`, an object with other keys before its name is no call.
    """

    def __init__(self, keys: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.broken = False  # this is no call
        self._keys = keys
        self._position = _Position.OPEN
        self._key = ""
        self._value = JsonValueReader("{")  # the current key or value
        self._arguments: JsonValueReader | None = None
        self._taken = False  # whether some of the arguments have been taken

    @property
    def done(self) -> bool:
        return self._position is _Position.END

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at` up to the end of the object or the first error, and return the position reached."""
        while at < len(text) and not (self.broken or self.done):
            if self._position is _Position.IN_KEY or self._position is _Position.IN_VALUE:
                at = self._value.feed(text, at)
                if self._value.complete:
                    self._end_value()
                self.broken = self.broken or self._value.broken
            elif self._step(text[at]):
                at += 1
        return at

    def take(self) -> str:
        """Return the new text of the arguments, empty until the name is known.

        A call without arguments has an empty object.
        """
        if self.name is None:
            return ""
        text = "" if self._arguments is None else self._arguments.take_arguments()
        if self.done and not self.broken and not (text or self._taken):
            text = "{}"
        self._taken = self._taken or bool(text)
        return text

    def _step(self, character: str) -> bool:
        match self._position:
            case _ if character in WHITESPACE:
                pass
            case _Position.OPEN if character == "{":
                self._position = _Position.KEY
            case _Position.KEY if character == '"':
                self._position, self._value = _Position.IN_KEY, JsonValueReader(character)
            case _Position.KEY | _Position.COMMA if character == "}":
                self._position = _Position.END
                self.broken = self.name is None
            case _Position.COLON if character == ":":
                self._position = _Position.VALUE
            case _Position.VALUE if character in _VALUE_STARTS:
                self._position, self._value = _Position.IN_VALUE, JsonValueReader(character)
                if self._key in _ARGUMENTS and self._arguments is None:  # the first of several counts
                    self._arguments = self._value
            case _Position.COMMA if character == ",":
                self._position = _Position.KEY
            case _:
                self.broken = True
        return not self.broken

    def _end_value(self) -> None:
        """Process a complete key or value."""
        if self._position is _Position.IN_KEY:
            self._key = decode_string(self._value.take()) or ""
            self._position = _Position.COLON
            self.broken = self.name is None and self._keys is not None and self._key not in self._keys
            return
        self._position = _Position.COMMA
        if self._key == "name" and self.name is None:
            self.name = decode_string(self._value.take()) or None
            self.broken = self.name is None
        elif self._key == "id" and self.id is None:
            self.id = decode_string(self._value.take())


def decode_string(text: str) -> str | None:
    """Return the value of a JSON string, or None for any other text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, str) else None
