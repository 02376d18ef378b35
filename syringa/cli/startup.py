"""What a command says before it loads a model: format, memory and threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.status import Status

from syringa.engine.processes.startup_plan import MemoryPlan, gigabytes
from syringa.types import LoadPhase, LoadProgress

PHASES: Mapping[LoadPhase, str] = {
    "queued": "waiting",
    "fetching": "fetching its files",
    "starting": "starting its worker",
    "weights": "reading weights",
    "warmup": "warming up",
}


def print_plan(console: Console, plan: MemoryPlan) -> None:
    for label, text in plan_rows(plan):
        console.print(f"  {label:<8}{text}", markup=False, highlight=False, soft_wrap=True)


def terminal_plan(console: Console) -> Callable[[MemoryPlan], None]:
    """Return a function that prints a plan, if the console is a terminal."""
    return lambda plan: print_plan(console, plan) if console.is_terminal else None


@contextlib.contextmanager
def loading_status(console: Console) -> Iterator[tuple[Status, Callable[[LoadProgress], None]]]:
    """Show that a model is being loaded, on a terminal, and how far it is as often as the yielded function is called.

    The status is to be stopped before anything else is written.
    """
    with console.status("Loading the model…") as status:
        yield status, lambda progress: status.update(f"Loading the model: {describe_progress(progress)}")


def describe_progress(progress: LoadProgress) -> str:
    text = PHASES[progress.phase]
    return f"{text} …" if progress.fraction is None else f"{text}, {progress.fraction:.0%}"


def plan_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Return the lines of a plan, each with its label."""
    model = plan.model
    architecture = model.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    about, where = ("about ", " on the GPU") if plan.device == "cuda" else ("", "")
    cache = f"{about}{gigabytes(plan.cache)} cache ({plan.cache_tokens:,} tokens) + " if plan.cache else ""
    cache += f"{gigabytes(plan.states)} states + " if plan.states else ""
    memory = (
        f"{gigabytes(plan.weights)} {plan.dtype} weights + {cache}{gigabytes(plan.program)} program, "
        f"of {gigabytes(plan.free)} free{where}"
    )
    rows = [
        ("Model", f"{model.name} ({architecture}, {_count(model.parameters)}, {model.format})"),
        ("Memory", memory),
        ("Threads", f"{plan.threads} of {plan.cores} cores"),
    ]
    if model.converted and plan.device == "cpu" and plan.dtype in ("gguf", "int8"):
        types = " and ".join(", ".join(model.converted).rsplit(", ", 1))
        become = "becomes" if len(model.converted) == 1 else "become"
        stored, taken = gigabytes(sum(model.converted.values())), gigabytes(model.converted_bytes)
        rows.append(("Types", f"{types} {become} int8: {stored} of the file take {taken} of memory"))
    if model.kind == "embed":
        rows.append(("Serves", f"embeddings of texts of up to {plan.context:,} tokens"))
    elif model.kind == "score":
        rows.append(("Serves", f"scores of pairs of up to {plan.context:,} tokens"))
    elif plan.reduced:
        most = plan.requested_context or model.max_model_len
        rows.append(("Context", f"{plan.context:,} of {most:,} tokens: the cache has room for no more"))
    return rows


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 950_000_000 else f"{parameters / 1e6:.0f}M"
