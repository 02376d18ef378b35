"""What the endpoint knows beyond the body: who asks, what was said before, and how to seal what only we may read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from syringa.api.decoding import Call
from syringa.api.responses.writer import ResponseWriter

Item = dict[str, Any]


class Seal(Protocol):
    """Authenticated encryption, for what a client carries for us and must neither read nor change."""

    def seal(self, text: str) -> str: ...

    def open(self, sealed: str) -> str | None:
        """The text; None: it was not sealed here, or not for this tenant."""
        ...


@dataclass(frozen=True, kw_only=True)
class Context:
    """`history`: the items before the new input, oldest first, as they were stored. `found`: those that references in
    the input name. `open_mode`: the client speaks Open Responses, which names some events differently."""

    tenant: str
    history: Sequence[Item]
    found: Mapping[str, Item]
    seal: Seal
    open_mode: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponseCall(Call):
    """`input`: the new items with ids and statuses, as they are stored and listed."""

    writer: ResponseWriter
    input: list[Item]
