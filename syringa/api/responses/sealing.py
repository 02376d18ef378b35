"""What is sealed says what it is, so that one thing cannot be passed off for another."""

from __future__ import annotations

from syringa.api.responses.context import Seal

_THOUGHT, _SUMMARY = "thought\n", "summary\n"


def seal_thought(seal: Seal, text: str) -> str:
    return seal.seal(_THOUGHT + text)


def open_thought(seal: Seal, sealed: str) -> str | None:
    return _opened(seal, sealed, _THOUGHT)


def seal_summary(seal: Seal, text: str) -> str:
    return seal.seal(_SUMMARY + text)


def open_summary(seal: Seal, sealed: str) -> str | None:
    return _opened(seal, sealed, _SUMMARY)


def _opened(seal: Seal, sealed: str, label: str) -> str | None:
    text = seal.open(sealed)
    return text[len(label) :] if text is not None and text.startswith(label) else None
