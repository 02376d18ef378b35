"""`syringa chat`: a conversation in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from syringa.cli.fields import to_fields
from syringa.cli.source import Source, open_source
from syringa.errors import EngineError, RequestError, SyringaError

HELP = """\
  /system TEXT   instructions for the model; without text, none
  /reset         forget the conversation
  /help          this
  /exit          leave; so does Ctrl-D
  Ctrl-C stops an answer. A line that ends in \\ goes on."""
_HISTORY = Path.home() / ".cache" / "syringa" / "chat_history"

# The API draws from the plain distribution; somebody who just wants to talk is better served by its likelier half.
FRIENDLY = {"temperature": 0.6, "top_p": 0.9}


def run(
    settings: dict[str, Any],
    options: dict[str, Any],
    file: Path | None,
    url: str | None,
    key: str | None,
    system: str | None,
) -> int:
    fields = {**FRIENDLY, **to_fields(options)}
    console = Console(highlight=False)
    with asyncio.Runner() as runner, _history():
        stack = contextlib.AsyncExitStack()
        try:
            with console.status("Loading the model…"):
                source = runner.run(stack.enter_async_context(open_source(settings, file, url, key)))
            console.print(f"[bold]{source.name}[/bold]  [dim]/help for help, Ctrl-D to leave[/dim]")
            Conversation(source, fields, console, runner, system).loop()
        finally:
            runner.run(stack.aclose())
    return 0


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(
        self, source: Source, fields: dict[str, Any], console: Console, runner: asyncio.Runner, system: str | None
    ) -> None:
        self._source, self._fields = source, fields
        self._console, self._runner = console, runner
        self._system = system
        self._turns: list[dict[str, Any]] = []

    def loop(self) -> None:
        while True:
            try:
                line = _read()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("[dim](Ctrl-D or /exit to leave)[/dim]")
                continue
            if not line.strip():
                continue
            if line.startswith("/"):
                if self._command(line) is False:
                    return
                continue
            self._turn(line)

    def _command(self, line: str) -> bool:
        """Whether the conversation goes on."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/reset":
                self._turns.clear()
                self._console.print("[dim]A new conversation.[/dim]")
            case "/system":
                self._system = rest.strip() or None
                self._console.print("[dim]Instructions set.[/dim]" if self._system else "[dim]No instructions.[/dim]")
            case "/help":
                self._console.print(HELP, markup=False)
            case _:
                self._console.print(f"There is no {name}; /help lists what there is.", markup=False)
        return True

    def _turn(self, text: str) -> None:
        """One question and its answer. A stopped answer stays in the conversation as far as it came."""
        self._turns.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            self._runner.run(self._answer(answer))
        except KeyboardInterrupt:
            self._console.print("\n[dim](stopped)[/dim]")
        except (RequestError, EngineError) as error:
            self._turns.pop()
            self._console.print(f"[red]{error.message}[/red]")
            return
        except SyringaError:
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": "".join(answer)})

    async def _answer(self, answer: list[str]) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        tokens, first, started = 0, 0.0, time.perf_counter()
        thinking = False
        async with contextlib.aclosing(self._source.chat([*system, *self._turns], self._fields)) as parts:
            async for part in parts:
                if part.tokens is not None:
                    tokens = part.tokens
                    continue
                first = first or time.perf_counter()
                if part.thought:
                    self._console.print(part.text, style="dim", end="", markup=False, soft_wrap=True)
                    thinking = True
                    continue
                if thinking:
                    self._console.print("\n")
                    thinking = False
                answer.append(part.text)
                sys.stdout.write(part.text)
                sys.stdout.flush()
        ended = time.perf_counter()
        rate = (tokens - 1) / (ended - first) if first and tokens > 1 and ended > first else 0.0
        wait = (first or ended) - started
        self._console.print(f"\n[dim]{tokens} tokens, {rate:.1f} a second, the first after {wait:.2f} s[/dim]")


def _read() -> str:
    lines = [input("\n› ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)


@contextlib.contextmanager
def _history() -> Any:
    """Arrow keys bring back earlier questions, those of earlier conversations too."""
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
