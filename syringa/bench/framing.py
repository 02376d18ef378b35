"""HTTP/1.1 and server-sent events, read from stored pieces of an answer and their times of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class Answer(msgspec.Struct):
    """A status, the body, and its events, each with the time at which its last byte arrived."""

    status: int = 0
    body: bytes = b""
    events: list[tuple[float, bytes]] = []


def read_answer(arrivals: Iterable[tuple[float, bytes]]) -> Answer:
    """Parses as much of an answer as has arrived: one that was cut gives what was whole."""
    answer = Answer(events=[])
    head = b""
    pieces: list[tuple[float, bytes]] = []
    in_head = True
    for arrived, data in arrivals:
        if not in_head:
            pieces.append((arrived, data))
            continue
        head += data
        if b"\r\n\r\n" in head:
            head, _, rest = head.partition(b"\r\n\r\n")
            in_head = False
            pieces.append((arrived, rest))
    status = head.split(b"\r\n", 1)[0].split(b" ")
    answer.status = int(status[1]) if len(status) > 1 and status[1].isdigit() else 0
    if in_head:
        return answer

    chunked = b"transfer-encoding: chunked" in head.lower()
    pending = b""
    body: list[bytes] = []
    for arrived, data in _unchunk(pieces) if chunked else pieces:
        body.append(data)
        *blocks, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        answer.events.extend((arrived, event) for block in blocks if (event := _data(block)))
    answer.body = b"".join(body)
    return answer


def _unchunk(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    buffer = b""
    for arrived, data in pieces:
        buffer += data
        while b"\r\n" in buffer:
            size_line, _, rest = buffer.partition(b"\r\n")
            size = int(size_line.split(b";")[0], 16)
            if size == 0:
                return
            if len(rest) < size + 2:
                break  # the chunk's end, with its line break, is still to come
            yield arrived, rest[:size]
            buffer = rest[size + 2 :]


def _data(block: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
