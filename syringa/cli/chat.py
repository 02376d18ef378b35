"""`syringa chat`: chat in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from syringa.cli.answer import AnswerPrinter
from syringa.cli.fields import to_fields
from syringa.cli.input_text import accept_any_bytes, replace_undecodable
from syringa.cli.models import ensure_model
from syringa.cli.source import TextSource, open_source
from syringa.cli.startup import loading_status, terminal_plan
from syringa.errors import EngineError, RequestError, SyringaError
from syringa.modelfiles.locate import models_dir

HELP = """\
  /system TEXT   set the system message; without TEXT, remove it
  /reset         start a new conversation
  /save FILE     write the conversation to a new file, as Markdown
  /help          show this help
  /exit          quit; so does Ctrl-D
  Ctrl-C stops an answer. A line that ends in \\ continues on the next line;
  \"\"\" begins and ends a message of several lines, or one that begins with /."""
_QUOTES = '"' * 3
_HISTORY_LINES = 1000

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
    if url is None:
        ensure_model(settings, file)
    accept_any_bytes()
    with asyncio.Runner() as runner, _history():
        stack = contextlib.AsyncExitStack()
        try:
            with loading_status(console) as (_, show):
                opened = open_source(settings, file, url, key, terminal_plan(console), show, chat=True)
                source = runner.run(stack.enter_async_context(opened))
            console.print(f"[bold]{escape(source.name)}[/bold]  [dim]/help for help, Ctrl-D to quit[/dim]")
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
        self._system = replace_undecodable(system) if system else None
        self._messages: list[dict[str, Any]] = []
        self._saved: set[Path] = set()  # files that this chat has written, and may write again

    def loop(self) -> None:
        while True:
            try:
                line, quoted = _read_message()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("[dim](Ctrl-D or /exit to quit)[/dim]")
                continue
            if not line.strip():
                continue
            if line.startswith("/") and not quoted:
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
            case "/save":
                self._save(rest.strip())
            case "/help":
                self._console.print(HELP, markup=False)
            case _:
                self._console.print(f"Unknown command {name}; /help lists the commands.", markup=False)
        return True

    def _ask(self, text: str) -> None:
        """Send a message and print the answer. The generated part of a stopped answer stays in the conversation."""
        self._messages.append({"role": "user", "content": text})
        printer = AnswerPrinter(self._console)
        try:
            with printer:
                self._runner.run(self._answer(printer))
            self._console.print(f"\n[dim]{printer.times.describe()}[/dim]")
        except KeyboardInterrupt:
            self._console.print("\n[dim](stopped)[/dim]")
        except (RequestError, EngineError) as error:
            self._messages.pop()
            self._console.print(error.message, style="red", markup=False)
            return
        except SyringaError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": printer.text})

    def _save(self, name: str) -> None:
        if not name:
            self._console.print("/save needs the name of a file.", markup=False)
            return
        messages = [*([{"role": "system", "content": self._system}] if self._system else []), *self._messages]
        text = "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in messages)
        content = text.encode(errors="replace")
        try:
            path = Path(name).expanduser().absolute()
            with path.open("wb" if path in self._saved else "xb") as file:
                file.write(content)
        except FileExistsError:
            self._console.print(f"{name} exists already: choose another name.", markup=False)
        except (OSError, RuntimeError, ValueError) as error:  # also below an unknown home, or with a null character
            reason = getattr(error, "strerror", None) or error
            self._console.print(f"{name} cannot be written: {reason}", markup=False)
        else:
            self._saved.add(path)
            self._console.print(f"Saved to {name}.", markup=False, style="dim")

    async def _answer(self, printer: AnswerPrinter) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        async with contextlib.aclosing(self._source.chat([*system, *self._messages], self._fields)) as chunks:
            async for chunk in chunks:
                printer.feed(chunk)


def _read_message() -> tuple[str, bool]:
    """Return a message, and whether it was between quotes."""
    lines = [input("\n› ")]
    if lines[0].lstrip().startswith(_QUOTES):
        lines = [lines[0].lstrip().removeprefix(_QUOTES)]
        while _QUOTES not in lines[-1]:
            lines.append(input("… "))
        lines[-1] = lines[-1].partition(_QUOTES)[0]
        return "\n".join(lines).strip("\n"), True
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines), False


@contextlib.contextmanager
def _history() -> Any:
    """Load and save the input history of readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    file = models_dir().parent / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
