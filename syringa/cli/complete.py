"""`syringa complete`: continue a text in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from syringa.cli.fields import to_fields
from syringa.cli.input_text import accept_any_bytes, replace_undecodable
from syringa.cli.source import TextSource, open_source
from syringa.cli.startup import loading_status
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
            raise ConfigError('no text given: pass one, as in syringa complete "Once upon a time"')
        accept_any_bytes()
        text = sys.stdin.read()
    text = replace_undecodable(text)
    fields = {"max_tokens": DEFAULT_TOKENS, **to_fields(options), "prompt": text, "echo": echo}
    console = Console(stderr=True)

    async def work() -> None:
        with loading_status(console) as (status, show):
            async with open_source(settings, file, url, key, on_progress=show) as source:
                status.stop()
                await _print_completions(source, fields, text if echo and url is None else "", console)

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    return 0


async def _print_completions(source: TextSource, fields: dict[str, Any], prompt: str, console: Console) -> None:
    """Print one completion as it is generated; several are printed one after the other at the end."""
    several = fields.get("n", 1) > 1
    completions: dict[int, list[str]] = {}
    tokens, started = 0, time.perf_counter()
    if not several:
        sys.stdout.write(prompt)
    async for chunk in source.complete(fields):
        if chunk.tokens is not None:
            tokens = chunk.tokens
        elif several:
            completions.setdefault(chunk.choice, []).append(chunk.text)
        else:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    for index, texts in sorted(completions.items()):
        sys.stdout.write(f"[{index}] {prompt}{''.join(texts)}\n")
    if not several:
        sys.stdout.write("\n")
    sys.stdout.flush()
    if console.is_terminal:
        console.print(f"[dim]{tokens} tokens, {tokens / seconds:.1f} tokens/s[/dim]", highlight=False)
