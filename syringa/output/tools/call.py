"""Reads one call, a JSON object with a name and arguments, while it is being written."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")


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
    """Character by character, so that it does not matter how the text is cut.

    `name` is set as soon as it is whole; `take` hands out what has been read of the arguments since, as the model wrote
    them. Arguments that come before the name wait for it, and arguments written as a string of JSON come unwrapped.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.broken = False  # this is no call
        self._at = _At.OPEN
        self._key = ""
        self._value: list[str] = []  # the raw text of the key or value at hand
        self._ready: list[str] = []  # of the arguments, not yet taken
        self._begun = False  # whether arguments have been passed on
        self._whole = False  # whether they are complete; later ones are not of this call
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def done(self) -> bool:
        return self._at is _At.END

    def feed(self, text: str) -> int:
        """Reads up to the end of the object, and says how many characters that took."""
        for index, character in enumerate(text):
            self._step(character)
            if self.broken or self._at is _At.END:
                return index + 1
        if self._streaming:
            self._release()
        return len(text)

    def take(self) -> str:
        """The arguments' text that is new; nothing before there is a name. A call without any has an empty object."""
        if self.name is None:
            return ""
        if self.done and not self._begun:
            self._begun = True
            return "{}"
        text = "".join(self._ready)
        self._ready.clear()
        return text

    @property
    def _streaming(self) -> bool:
        """Whether the value at hand are arguments that can be passed on before they are whole: an object."""
        if self._at is not _At.IN_VALUE or self._key not in _ARGUMENTS or self._whole:
            return False
        return self._begun or self._value[0] == "{"

    def _release(self) -> None:
        self._ready += self._value
        self._value.clear()
        self._begun = True

    def _step(self, character: str) -> None:
        match self._at:
            case _At.IN_KEY | _At.IN_VALUE:
                self._inside(character)
            case _ if character in _SPACE:
                pass
            case _At.OPEN if character == "{":
                self._at = _At.KEY
            case _At.KEY if character == '"':
                self._begin(_At.IN_KEY, character)
            case _At.KEY | _At.COMMA if character == "}":
                self._at = _At.END
                self.broken = self.name is None
            case _At.COLON if character == ":":
                self._at = _At.VALUE
            case _At.VALUE if character not in ",:]}":
                self._begin(_At.IN_VALUE, character)
            case _At.COMMA if character == ",":
                self._at = _At.KEY
            case _:
                self.broken = True

    def _begin(self, at: _At, character: str) -> None:
        self._at = at
        self._value = [character]
        self._in_string = character == '"'
        self._escaped = False
        self._depth = int(character in "{[")

    def _inside(self, character: str) -> None:
        if self._in_string:
            self._value.append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end()
            return
        if self._depth == 0:  # a number or a word: it has no end of its own
            if character in _SPACE or character in ",}":
                self._end()
                self._step(character)
            else:
                self._value.append(character)
            return
        self._value.append(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end()

    def _end(self) -> None:
        """A key or a value is whole."""
        if self._at is _At.IN_KEY:
            self._key = _string("".join(self._value)) or ""
            self._at = _At.COLON
            return
        self._at = _At.COMMA
        if self._key == "name" and self.name is None:
            self.name = _string("".join(self._value)) or None
            self.broken = self.name is None
        elif self._key in _ARGUMENTS and not self._whole:
            self._whole = True
            if not self._begun and self._value[0] != "{":
                text = "".join(self._value)
                self._value = ["{}"] if text == "null" else [_string(text) or text]
            self._release()


def _string(text: str) -> str | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, str) else None
