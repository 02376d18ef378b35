"""`syringa run`: one question to a model, and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from syringa.cli import chat
from syringa.cli.answer import AnswerPrinter
from syringa.cli.fields import to_fields
from syringa.cli.input_text import read_piped, replace_undecodable
from syringa.cli.models import ensure_model
from syringa.cli.source import open_source
from syringa.cli.startup import loading_status, terminal_plan
from syringa.errors import ConfigError


def run(
    question: str | None,
    settings: dict[str, Any],
    options: dict[str, Any],
    file: Path | None,
    url: str | None,
    key: str | None,
    system: str | None,
) -> int:
    if question is None and sys.stdin is not None and sys.stdin.isatty():
        return chat.run(settings, options, file, url, key, system)
    question = _join(question or "", read_piped())
    if not question.strip():
        raise ConfigError("the question is empty")
    if url is None:
        ensure_model(settings, file)
    fields = {**chat.CHAT_SAMPLING, **to_fields(options)}
    messages = [{"role": "user", "content": replace_undecodable(question)}]
    if system:
        messages.insert(0, {"role": "system", "content": replace_undecodable(system)})
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)

    async def work() -> None:
        with loading_status(errors) as (status, show):
            opened = open_source(settings, file, url, key, terminal_plan(errors), show, chat=True)
            async with opened as source:
                status.stop()
                with AnswerPrinter(console) as printer:
                    async with contextlib.aclosing(source.chat(messages, fields)) as chunks:
                        async for chunk in chunks:
                            printer.feed(chunk)
                if not console.is_terminal:
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                if errors.is_terminal:
                    errors.print(f"[dim]{printer.times.describe()}[/dim]")

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        return 130
    return 0


def _join(question: str, piped: str) -> str:
    """Return a question with the text that it is about, as in `cat FILE | syringa run MODEL QUESTION`."""
    return "\n\n".join(part for part in (question, piped) if part.strip())
