"""`syringa complete`: a text goes on in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from syringa.cli.fields import to_fields
from syringa.cli.source import Source, open_source
from syringa.errors import ConfigError

DEFAULT_TOKENS = 256


def run(
    text: str | None,
    settings: dict[str, Any],
    options: dict[str, Any],
    file: Path | None,
    url: str | None,
    key: str | None,
    *,
    echo: bool,
) -> int:
    if text is None:
        if sys.stdin.isatty():
            raise ConfigError('give a text to continue: syringa complete "Once upon a time"')
        text = sys.stdin.read()
    fields = {"max_tokens": DEFAULT_TOKENS, **to_fields(options), "prompt": text, "echo": echo}
    console = Console(stderr=True)

    async def work() -> None:
        with console.status("Loading the model…") as status:
            async with open_source(settings, file, url, key) as source:
                status.stop()
                await _show(source, fields, text if echo and url is None else "", console)

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


async def _show(source: Source, fields: dict[str, Any], before: str, console: Console) -> None:
    """One answer as it comes; several one after the other, since they would mix."""
    several = fields.get("n", 1) > 1
    answers: dict[int, list[str]] = {}
    tokens, started = 0, time.perf_counter()
    if not several:
        sys.stdout.write(before)
    async for part in source.complete(fields):
        if part.tokens is not None:
            tokens = part.tokens
        elif several:
            answers.setdefault(part.choice, []).append(part.text)
        else:
            sys.stdout.write(part.text)
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    for index, texts in sorted(answers.items()):
        sys.stdout.write(f"[{index}] {before}{''.join(texts)}\n")
    if not several:
        sys.stdout.write("\n")
    sys.stdout.flush()
    if console.is_terminal:
        console.print(f"[dim]{tokens} tokens, {tokens / seconds:.1f} a second[/dim]", highlight=False)
