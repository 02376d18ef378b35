"""What the endpoints of `/v1/responses` know beyond the body, and the result of preparing a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from syringa.api.output_writer import PreparedRequest
from syringa.api.responses.writer import ResponseWriter
from syringa.remote_tools import RemoteToolClient

Item = dict[str, Any]

# Prefixes of encrypted texts, so that a client cannot pass one kind off as the other.
_REASONING, _SUMMARY = "thought\n", "summary\n"


class Cipher(Protocol):
    """Authenticated encryption of content that a client stores and sends back, but must not read or change."""

    def encrypt(self, text: str) -> str: ...

    def decrypt(self, encrypted: str) -> str | None:
        """Return the text, or None if it was not encrypted by this server for this tenant."""
        ...


@dataclass(frozen=True, kw_only=True)
class ResponseContext:
    """The state that a request refers to.

    `history` has the stored items before the new input, oldest first; `referenced_items` those that item references in
    the input name. `open_mode` selects the Open Responses variant of the wire format. `mcp` is the access to MCP
    servers, which a response may call `max_mcp_calls` times.
    """

    tenant: str
    history: Sequence[Item]
    referenced_items: Mapping[str, Item]
    cipher: Cipher
    open_mode: bool = False
    mcp: RemoteToolClient | None = None
    max_mcp_calls: int = 0


@dataclass(frozen=True, kw_only=True)
class PreparedResponse(PreparedRequest):
    """A validated request for a response. `input` are its new items as they are stored, with ids and statuses."""

    writer: ResponseWriter
    input: list[Item]


def encrypt_reasoning(cipher: Cipher, text: str) -> str:
    return cipher.encrypt(_REASONING + text)


def decrypt_reasoning(cipher: Cipher, encrypted: str) -> str | None:
    return _decrypt(cipher, encrypted, _REASONING)


def encrypt_summary(cipher: Cipher, text: str) -> str:
    return cipher.encrypt(_SUMMARY + text)


def decrypt_summary(cipher: Cipher, encrypted: str) -> str | None:
    return _decrypt(cipher, encrypted, _SUMMARY)


def _decrypt(cipher: Cipher, encrypted: str, prefix: str) -> str | None:
    text = cipher.decrypt(encrypted)
    return text[len(prefix) :] if text is not None and text.startswith(prefix) else None
