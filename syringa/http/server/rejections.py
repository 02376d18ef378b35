"""Requests that never become one."""

from __future__ import annotations

from syringa.errors import EngineOverloaded, RequestError

MAX_HEAD = 64 << 10


class Refused(RequestError):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.status = status


def size_of(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def too_large() -> Refused:
    return Refused(431, "headers_too_large", f"The request's headers are longer than {MAX_HEAD} bytes.")


def too_many() -> EngineOverloaded:
    return EngineOverloaded("Too many connections are open; try again shortly.", code="too_many_connections")
