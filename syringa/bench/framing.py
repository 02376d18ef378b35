"""Parse HTTP/1.1 responses and server-sent events from recorded chunks with their arrival times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


class RawResponse(msgspec.Struct):
    """Status, body and events of a response, each event with the arrival time of its last byte."""

    status: int = 0
    body: bytes = b""
    events: list[tuple[float, bytes]] = []


def read_response(received: Iterable[tuple[float, bytes]]) -> RawResponse:
    """Parse as much of a response as has arrived. An incomplete event is dropped."""
    response = RawResponse(events=[])
    head = b""
    body_data: list[tuple[float, bytes]] = []
    in_head = True
    for arrived, data in received:
        if not in_head:
            body_data.append((arrived, data))
            continue
        head += data
        if b"\r\n\r\n" in head:
            head, _, rest = head.partition(b"\r\n\r\n")
            in_head = False
            body_data.append((arrived, rest))
    status = head.split(b"\r\n", 1)[0].split(b" ")
    response.status = int(status[1]) if len(status) > 1 and status[1].isdigit() else 0
    if in_head:
        return response

    chunked = b"transfer-encoding: chunked" in head.lower()
    pending = b""
    body: list[bytes] = []
    for arrived, data in _decode_chunked(body_data) if chunked else body_data:
        body.append(data)
        *blocks, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        response.events.extend((arrived, event) for block in blocks if (event := _event_data(block)))
    response.body = b"".join(body)
    return response


def _decode_chunked(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    buffer = b""
    for arrived, data in chunks:
        buffer += data
        while b"\r\n" in buffer:
            size_line, _, rest = buffer.partition(b"\r\n")
            size = int(size_line.split(b";")[0], 16)
            if size == 0:
                return
            if len(rest) < size + 2:
                break  # the chunk is incomplete
            yield arrived, rest[:size]
            buffer = rest[size + 2 :]


def _event_data(block: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
