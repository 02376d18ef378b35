"""`syringa models` and `syringa pull`."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from syringa import modelfiles


def show() -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "architecture", "size", "where"):
        table.add_column(title, no_wrap=True, justify="right" if title == "size" else "left")
    for known in modelfiles.known_models():
        if known.present:
            table.add_row(known.name, known.architecture or "", decimal(known.size), known.path or "")
        else:
            where = f"{known.path} is broken" if known.path else f"not here: syringa pull {known.name}"
            table.add_row(known.name, "", "", f"[dim]{where}[/dim]")
    # As wide as it has to be: a path that is broken into lines cannot be copied.
    Console(width=400).print(table, soft_wrap=True)


def fetch(model: str) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(f"Fetching {model}", total=None)
        files = modelfiles.pull(model, lambda done, total: progress.update(task, completed=done, total=total or None))
    console.print(f"{files.name} is at {files.path}", highlight=False, soft_wrap=True)
