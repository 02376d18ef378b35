"""`syringa chat`: chat in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from syringa.cli.fields import to_fields
from syringa.cli.source import TextSource, open_source
from syringa.errors import EngineError, RequestError, SyringaError

HELP = """\
  /system TEXT   set the system message; without TEXT, remove it
  /reset         start a new conversation
  /help          show this help
  /exit          quit; so does Ctrl-D
  Ctrl-C stops an answer. A line that ends in \\ continues on the next line."""
_HISTORY = Path.home() / ".cache" / "syringa" / "chat_history"

# The API samples from the full distribution by default; these values suit a chat better.
CHAT_SAMPLING = {"temperature": 0.6, "top_p": 0.9}


def run(
    settings: dict[str, Any],
    options: dict[str, Any],
    file: Path | None,
    url: str | None,
    key: str | None,
    system: str | None,
) -> int:
    fields = {**CHAT_SAMPLING, **to_fields(options)}
    console = Console(highlight=False)
    with asyncio.Runner() as runner, _history():
        stack = contextlib.AsyncExitStack()
        try:
            with console.status("Loading the model…"):
                source = runner.run(stack.enter_async_context(open_source(settings, file, url, key)))
            console.print(f"[bold]{source.name}[/bold]  [dim]/help for help, Ctrl-D to quit[/dim]")
            ChatSession(source, fields, console, runner, system).loop()
        finally:
            runner.run(stack.aclose())
    return 0


class ChatSession:
    """The messages of a chat, and the commands that change them."""

    def __init__(
        self, source: TextSource, fields: dict[str, Any], console: Console, runner: asyncio.Runner, system: str | None
    ) -> None:
        self._source, self._fields = source, fields
        self._console, self._runner = console, runner
        self._system = system
        self._messages: list[dict[str, Any]] = []

    def loop(self) -> None:
        while True:
            try:
                line = _read_message()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("[dim](Ctrl-D or /exit to quit)[/dim]")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if self._command(line) is False:
                    return
                continue
            self._ask(line)

    def _command(self, line: str) -> bool:
        """Run a command. Return whether the session continues."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/reset":
                self._messages.clear()
                self._console.print("[dim]New conversation.[/dim]")
            case "/system":
                self._system = rest.strip() or None
                self._console.print(
                    "[dim]System message set.[/dim]" if self._system else "[dim]System message removed.[/dim]"
                )
            case "/help":
                self._console.print(HELP, markup=False)
            case _:
                self._console.print(f"Unknown command {name}; /help lists the commands.", markup=False)
        return True

    def _ask(self, text: str) -> None:
        """Send a message and print the answer. The generated part of a stopped answer stays in the conversation."""
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            self._runner.run(self._answer(answer))
        except KeyboardInterrupt:
            self._console.print("\n[dim](stopped)[/dim]")
        except (RequestError, EngineError) as error:
            self._messages.pop()
            self._console.print(f"[red]{error.message}[/red]")
            return
        except SyringaError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})

    async def _answer(self, answer: list[str]) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        tokens, first, started = 0, 0.0, time.perf_counter()
        reasoning = False
        async with contextlib.aclosing(self._source.chat([*system, *self._messages], self._fields)) as chunks:
            async for chunk in chunks:
                if chunk.tokens is not None:
                    tokens = chunk.tokens
                    continue
                first = first or time.perf_counter()
                if chunk.reasoning:
                    self._console.print(chunk.text, style="dim", end="", markup=False, soft_wrap=True)
                    reasoning = True
                    continue
                if reasoning:
                    self._console.print("\n")
                    reasoning = False
                answer.append(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        ended = time.perf_counter()
        rate = (tokens - 1) / (ended - first) if first and tokens > 1 and ended > first else 0.0
        wait = (first or ended) - started
        self._console.print(f"\n[dim]{tokens} tokens, {rate:.1f} tokens/s, first token after {wait:.2f} s[/dim]")


def _read_message() -> str:
    lines = [input("\n› ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)


@contextlib.contextmanager
def _history() -> Any:
    """Load and save the input history of readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(_HISTORY)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            _HISTORY.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(_HISTORY)
