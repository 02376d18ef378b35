"""Reader of GGUF metadata and tensor tables. Tensor data is not read.

The reader of the `gguf` package takes 2.4 s for a vocabulary of 49,000 tokens, this one about 50 ms. A truncated or
corrupt file raises `ModelError`: every length is checked against the rest of the file. The header is read into memory
and not mapped, because reading a mapped file that is truncated meanwhile ends the process.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from syringa.errors import ModelError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value types, by their number in the file.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}

# Tensor types: number → (name, elements in a block, bytes of a block).
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Types that cannot be read, and withdrawn ones: Q4_0 and IQ4_NL in the order of some processors' registers.
_OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}
OTHER_QUANTIZATION = "fetch the model in another quantization, such as Q4_K_M or Q4_0"  # advice of error messages

_PART = re.compile(r"(.+)-(?:\d{5})-of-(\d{5})\.gguf")
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,000 tokens takes 15 MB
_READ_BYTES = 1 << 20  # at first; then twice as many each time
_MAX_QUOTED = 80  # characters of a value in an error message
_SETTLED_SECONDS = 2.0  # file systems do not tell writes apart that follow each other closely
_remembered: dict[Path, tuple[tuple[tuple[int, int, int], ...], GgufFile]] = {}  # what was read last


class TensorInfo(msgspec.Struct, frozen=True):
    """Location of a tensor. `shape` is in GGUF's order: the fastest-varying dimension first."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the beginning of the file
    size: int  # in bytes
    file: str  # of a split model, the part that holds it


class GgufFile(msgspec.Struct, frozen=True):
    """A model. Of one that is split, `path` is the first part, and `tensors` are those of all parts."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def floats(self, name: str) -> list[float]:
        """Return the values of a small F32 tensor."""
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise ModelError(f"{self.path}: {name} should be F32, but is {tensor.type}")
        with Path(tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.size)
        if len(data) < tensor.size:
            raise ModelError(f"{tensor.file} was truncated while it was read; fetch it again")
        return list(struct.unpack(f"<{tensor.size // 4}f", data))


def quoted(value: object) -> str:
    """Return a value from a file for an error message: in one line, and shortened."""
    text = repr(value[:_MAX_QUOTED] if isinstance(value, (str, list)) else value)
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file."""
    return read_gguf(path).metadata


def read_first_metadata(beginning: bytes) -> dict[str, Any]:
    """Return the metadata in the first bytes of a GGUF file: the keys that are there whole. Empty for other files."""
    reader = _GgufReader(io.BytesIO(beginning), "", len(beginning))
    with contextlib.suppress(ModelError):
        reader.read()
    return reader.metadata


def read_gguf(path: str | Path) -> GgufFile:
    """Return the metadata and the tensor table of a GGUF file. Any part of a split model stands for all of them.

    The last one is remembered until `forget_gguf`: a start needs it several times, and a large vocabulary takes 0.15 s.
    """
    path = Path(path)
    if (remembered := _remembered.get(path)) is not None and remembered[0] == _versions(remembered[1]):
        return remembered[1]
    file = _read_part(path)
    count = file.metadata.get("split.count", 0)
    if count not in (0, 1):
        file = _join_parts(path, count)
    _remembered.clear()
    if (versions := _versions(file)) is not None:
        _remembered[path] = versions, file
    return file


def forget_gguf() -> None:
    """Free the memory of the file that `read_gguf` has read last."""
    _remembered.clear()


def _versions(file: GgufFile) -> tuple[tuple[int, int, int], ...] | None:
    """Return what changes when a file does; None if it was written so recently that this is not certain."""
    try:
        found = [os.stat(part) for part in sorted({file.path, *(info.file for info in file.tensors.values())})]
    except OSError:
        return None
    if max(stat.st_mtime for stat in found) > time.time() - _SETTLED_SECONDS:
        return None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def _join_parts(path: Path, count: object) -> GgufFile:
    match = _PART.fullmatch(path.name)
    if match is None or not isinstance(count, int) or int(match[2]) != count:
        raise ModelError(f"{path} is one part of {quoted(count)}: keep names such as model-00001-of-00002.gguf")
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path} is one part of {count}, and {missing[0]} is missing: fetch it again")
    files = [_read_part(part) for part in parts]
    tensors: dict[str, TensorInfo] = {}
    for number, file in enumerate(files):
        stated = file.metadata.get("split.no", number), file.metadata.get("split.count", count)
        if stated != (number, count):
            raise ModelError(f"{file.path} says that it is part {stated[0]} of {stated[1]}, from 0 on: fetch it again")
        if twice := tensors.keys() & file.tensors.keys():
            raise ModelError(f"{file.path}: the tensor {quoted(min(twice))} is also in another part: fetch them again")
        tensors.update(file.tensors)
    expected = files[0].metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors and not {quoted(expected)}; fetch them again")
    return GgufFile(str(parts[0]), files[0].metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _GgufReader(file, str(path), os.fstat(file.fileno()).st_size).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


class _GgufReader:
    """Parser of a header. `place` is what it is reading, for error messages."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self.file = file
        self.size = size
        self.metadata: dict[str, Any] = {}
        self.data = bytearray()
        self.path = path
        self.at = 0
        self.place = "the header"

    def read(self) -> GgufFile:
        if self.size < 4 or self.data[self.advance(4) : 4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.number(_U32)
        if version not in (2, 3):
            # A big-endian file has its version in the upper bytes.
            kind = "a big-endian file" if version & 0xFFFF == 0 and version else f"GGUF version {version}"
            raise ModelError(f"{self.path}: {kind} cannot be read; convert the model again with a current converter")
        tensor_count = self.number(_U64)
        pair_count = self.number(_U64)
        metadata = self.metadata
        for index in range(self.check_count(pair_count, 13)):
            self.place = f"key {index + 1} of {pair_count}"
            key = self.string()
            self.place = f"the key {quoted(key)}"
            if key in metadata:
                raise self.corrupt("occurs twice")
            metadata[key] = self.value(self.number(_U32))
        return GgufFile(self.path, metadata, self.tensors(tensor_count, metadata))

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        self.place = "the table of tensors"
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(self.check_count(count, 24)):
            self.place = f"tensor {index + 1} of {count}"
            name = self.string()
            self.place = f"the tensor {quoted(name)}"
            if name in table:
                raise self.corrupt("occurs twice")
            dims = self.number(_U32)
            if not 1 <= dims <= _MAX_DIMS:
                raise self.corrupt(f"has {dims} dimensions")
            shape = tuple(self.number(_U64) for _ in range(dims))
            table[name] = shape, self.number(_U32), self.number(_U64)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self.place = "the key 'general.alignment'"
            raise self.corrupt(f"is {quoted(alignment)}")

        def aligned(position: int) -> int:
            return (position + alignment - 1) // alignment * alignment

        start, expected = aligned(self.at), 0
        tensors = {}
        for name, (shape, type_number, offset) in table.items():
            self.place = f"the tensor {quoted(name)}"
            if type_number not in _TENSOR_TYPES:
                kind = _OTHER_TYPES.get(type_number)
                what = f"type {kind}, which is not supported" if kind else f"unknown type {type_number}"
                raise ModelError(f"{self.path}: {self.place} is of the {what}: {OTHER_QUANTIZATION}")
            type_name, block, block_bytes = _TENSOR_TYPES[type_number]
            elements = math.prod(shape)
            if shape[0] % block or elements == 0:
                raise self.corrupt(f"of type {type_name} has the shape {shape}")
            if offset != expected:
                raise self.corrupt(f"begins at byte {offset} of the data and not at {expected}")
            size = elements // block * block_bytes
            if start + offset + size > self.size:
                raise self.truncated(start + offset + size)
            expected = aligned(offset + size)
            tensors[name] = TensorInfo(name, shape, type_name, start + offset, size, self.path)
        return tensors

    def advance(self, count: int) -> int:
        """Return the position of the next `count` bytes, which are in `data`, and go past them."""
        at = self.at
        if at + count > len(self.data):
            self.fill(at + count)
        self.at = at + count
        return at

    def fill(self, end: int) -> int:
        """Read the file up to `end` at least. Return how much of it is in `data`."""
        if end > self.size:
            raise self.truncated(end)
        if end > _MAX_HEADER_BYTES:
            raise self.corrupt(f"ends beyond the {_MAX_HEADER_BYTES >> 20} MiB of the largest header")
        self.data += self.file.read(max(end - len(self.data), len(self.data), _READ_BYTES))
        if end > len(self.data):
            raise ModelError(f"{self.path} was truncated while it was read; fetch it again")
        return len(self.data)

    def number(self, kind: struct.Struct) -> Any:
        at = self.advance(kind.size)
        return kind.unpack_from(self.data, at)[0]

    def string(self) -> str:
        at = self.advance(self.number(_U64))
        try:
            return self.data[at : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt("has a string that is not UTF-8") from error

    def value(self, type_number: int) -> Any:
        if type_number in _SCALARS:
            return self.number(_SCALARS[type_number])
        if type_number == _STRING:
            return self.string()
        if type_number == _ARRAY:
            return self.array()
        raise self.corrupt(f"is of the unknown type {type_number}")

    def array(self) -> list[Any]:
        type_number = self.number(_U32)
        count = self.number(_U64)
        if type_number == _STRING:
            return self.strings(self.check_count(count, 8))
        if type_number not in _SCALARS:
            raise self.corrupt(f"is an array of the type {type_number}")
        kind = _SCALARS[type_number]
        at = self.advance(self.check_count(count, kind.size) * kind.size)
        code = kind.format[-1]
        return list(struct.unpack_from(f"<{count}{code}", self.data, at))

    def strings(self, count: int) -> list[str]:
        # Inlined `string`, because the vocabulary is read here.
        data, have, unpack = self.data, len(self.data), _U64.unpack_from
        at = self.at
        values: list[str] = []
        append: Callable[[str], None] = values.append
        try:
            for _ in range(count):
                start = at + 8
                if start > have:
                    have = self.fill(start)
                at = start + unpack(data, at)[0]
                if at > have:
                    have = self.fill(at)
                append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise self.corrupt(f"has a string that is not UTF-8, number {len(values)}") from error
        self.at = at
        return values

    def check_count(self, count: int, min_bytes: int) -> int:
        """Return `count` if so many items of at least `min_bytes` fit in the rest of the file and in a header."""
        end = self.at + count * min_bytes
        if end > self.size:
            raise self.truncated(end)
        if end > _MAX_HEADER_BYTES:
            raise self.corrupt(f"ends beyond the {_MAX_HEADER_BYTES >> 20} MiB of the largest header")
        return count

    def truncated(self, needed: int) -> ModelError:
        return ModelError(
            f"{self.path} is cut off or corrupt: it has {self.size:,} bytes, and {self.place} needs {needed:,}; "
            "fetch it again"
        )

    def corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt: {self.place} {what}; fetch it again")
