"""Corruptions of a GGUF file: every field of its header by name, and random ones with a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

from .gguf_builder import ALIGNMENT

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 3  # of an array, whose items are fields
_INTEGERS = (0, 1, 2, 3, 5, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**60, 2**63, 2**64 - 1)
_FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, 1e-45, 1e-6, 0.5, 1.0, 3.4e38)
_HALVES = (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e", b"\xff\xff", b"\xff\x7b", b"\x00\x00")


class Field(NamedTuple):
    name: str
    offset: int
    format: str  # of `struct`

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.format)


class Corruption(NamedTuple):
    name: str
    data: bytes


class _Walker:
    """A second parser of headers, for correct files."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 4
        self.fields = [Field("magic", 0, "I")]

    def number(self, name: str, format_: str) -> int:
        field = Field(name, self.at, format_)
        self.fields.append(field)
        self.at += field.size
        value: int = struct.unpack_from("<" + format_, self.data, field.offset)[0]
        return value

    def string(self, name: str) -> str:
        length = self.number(f"length of {name}", "Q")
        if length:
            self.fields.append(Field(f"first byte of {name}", self.at, "B"))
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, name: str, kind: int) -> None:
        if kind == _STRING:
            self.string(name)
        elif kind == _ARRAY:
            items, count = self.number(f"item type of {name}", "I"), self.number(f"count of {name}", "Q")
            for index in range(count):
                walker = self if index < _MAX_ITEMS else _Walker(self.data)  # whose fields are dropped
                walker.at = self.at
                walker.value(f"{name}[{index}]", items)
                self.at = walker.at
        else:
            self.number(name, _FORMATS[kind])

    def walk(self) -> None:
        self.number("version", "I")
        tensors, pairs = self.number("tensor count", "Q"), self.number("key count", "Q")
        for _ in range(pairs):
            key = self.string("a key")
            self.value(key, self.number(f"type of {key}", "I"))
        for _ in range(tensors):
            name = self.string("a tensor's name")
            for index in range(self.number(f"dimensions of {name}", "I")):
                self.number(f"dimension {index} of {name}", "Q")
            self.number(f"type of {name}", "I")
            self.number(f"offset of {name}", "Q")


def header_fields(data: bytes) -> list[Field]:
    """Return every field of the header of a correct file."""
    walker = _Walker(data)
    walker.walk()
    return walker.fields


def header_size(data: bytes) -> int:
    walker = _Walker(data)
    walker.walk()
    return walker.at


def corrupt_fields(data: bytes) -> Iterator[Corruption]:
    """Yield the file with each field of its header replaced by each extreme value."""
    for field in header_fields(data):
        for value in corrupt_values(data, field):
            yield Corruption(f"{field.name} is {value}", replace(data, field, value))


def corrupt_values(data: bytes, field: Field) -> list[int | float]:
    current = struct.unpack_from("<" + field.format, data, field.offset)[0]
    if field.format in "fd":
        return list(_FLOATS)
    top = 2 ** (8 * field.size)
    near = (current - 1, current + 1, current * 2, current // 2, current + ALIGNMENT)
    return sorted({value % top for value in (*_INTEGERS, *near)} - {current % top})


def replace(data: bytes, field: Field, value: float) -> bytes:
    format_ = field.format if isinstance(value, float) else {1: "B", 2: "H", 4: "I", 8: "Q"}[field.size]
    return data[: field.offset] + struct.pack("<" + format_, value) + data[field.offset + field.size :]


def corrupt_randomly(data: bytes, choice: random.Random) -> Corruption:
    """Return the file with one to three random defects: in a field, in bytes, in a scale, or of its length."""
    fields, header = header_fields(data), header_size(data)
    names = []
    for _ in range(choice.choice((1, 1, 2, 3))):
        kind = choice.choice(("field", "header bytes", "data bytes", "half", "cut", "shift", "copy"))
        at = choice.randrange(header if kind == "header bytes" else len(data))
        if kind == "field":
            field = choice.choice(fields)
            if field.offset + field.size > len(data):
                continue
            value = choice.choice(corrupt_values(data, field))
            data, kind = replace(data, field, value), f"{field.name} is {value}"
        elif kind in ("header bytes", "data bytes"):
            data = data[:at] + choice.randbytes(choice.choice((1, 1, 2, 8))) + data[at + 1 :]
        elif kind == "half":
            data = data[:at] + choice.choice(_HALVES) + data[at + 2 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "shift":
            data = data[:at] + choice.randbytes(choice.randrange(1, 64)) + data[at:]
        else:
            other = choice.randrange(len(data))
            size = choice.randrange(1, 512)
            data = data[:at] + data[other : other + size] + data[at + size :]
        names.append(f"{kind} at {at}")
        if len(data) < 64:
            break
    return Corruption(", ".join(names), data)


def corrupt_tensor(data: bytes, offset: int, size: int, choice: random.Random) -> Corruption:
    """Return the file with a random half or single of a tensor that is not a finite number, or very large."""
    bad = choice.choice((*_HALVES, *(struct.pack("<f", value) for value in _FLOATS)))
    at = offset + choice.randrange(max(1, size - len(bad)) // 2) * 2
    return Corruption(f"{bad.hex()} at {at}", data[:at] + bad + data[at + len(bad) :])
