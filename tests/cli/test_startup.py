"""What commands say before they load a model: the plan, or why the model does not fit."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from syringa.cli.startup import plan_rows, terminal_plan
from syringa.config import Config, ModelSpec
from syringa.engine.loading.memory_plan import PROGRAM_BYTES, MemoryPlan
from syringa.engine.loading.model_size import ModelSize
from syringa.engine.processes import startup_plan, supervisor
from syringa.engine.processes.nvml import GpuMemory
from tests.cli.conftest import Result
from tests.engine.loading.gguf_files import write_gguf

GB = 10**9
CODER = ModelSize(
    name="qwen2.5-coder-1.5b",
    architecture="Qwen2ForCausalLM",
    format="GGUF Q4_K_M",
    parameters=1_540_000_000,
    native=True,
    weights={"gguf": 1_110_000_000},
    max_model_len=32_768,
)


def make_plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {
        "model": CODER, "dtype": "gguf", "free": 18_234_000_000, "weights": 1_110_000_000, "cache": 1_880_000_000,
        "program": 500_000_000, "cache_tokens": 65_536, "context": 32_768, "threads": 2, "cores": 4,
    }  # fmt: skip
    return MemoryPlan(**(values | changes))


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(startup_plan, "available_memory", lambda: free)
    monkeypatch.setattr(startup_plan, "gpu_memories", list)


def test_plan_rows_name_format_memory_and_threads() -> None:
    assert plan_rows(make_plan()) == [
        ("Model", "qwen2.5-coder-1.5b (Qwen2, 1.5B, GGUF Q4_K_M)"),
        (
            "Memory",
            "1.11 GB gguf weights + 1.88 GB cache (65,536 tokens) + 0.50 GB program, of 18.2 GB free",
        ),
        ("Threads", "2 of 4 cores"),
    ]


def test_plan_rows_name_types_that_become_int8() -> None:
    converted = {"Q3_K": 3_200_000_000, "IQ2_S": 100_000_000, "Q2_K": 30_000_000}
    model = msgspec.structs.replace(CODER, converted=converted, converted_bytes=7_900_000_000)
    row = ("Types", "Q3_K, IQ2_S and Q2_K become int8: 3.33 GB of the file take 7.90 GB of memory")
    assert plan_rows(make_plan(model=model))[-1] == row
    one = msgspec.structs.replace(model, converted={"Q3_K": 3_200_000_000})
    assert plan_rows(make_plan(model=one, dtype="int8"))[-1][1].startswith("Q3_K becomes int8: 3.20 GB")
    assert "Types" not in dict(plan_rows(make_plan(model=model, dtype="bf16")))
    assert "Types" not in dict(plan_rows(make_plan(model=model, dtype="bf16", device="cuda")))


def test_plan_rows_name_a_reduced_context() -> None:
    assert plan_rows(make_plan(context=8192))[-1] == (
        "Context",
        "8,192 of 32,768 tokens: the cache has room for no more",
    )


def test_plan_rows_of_gpu_are_estimates() -> None:
    memory = dict(plan_rows(make_plan(device="cuda", dtype="bf16")))["Memory"]
    assert "+ about 1.88 GB cache" in memory
    assert memory.endswith("of 18.2 GB free on the GPU")


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_plan_is_silent_outside_of_terminals(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    terminal_plan(console)(make_plan())
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("2 of 4 cores" in output) is terminal


def test_serve_prints_the_plan_and_hands_it_to_the_supervisor(
    syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = PROGRAM_BYTES + 10_000_000
    set_free_memory(monkeypatch, free)
    planned: list[int] = []

    def run(*_: Any, planned_free: int, **__: Any) -> int:
        planned.append(planned_free)
        return 0

    monkeypatch.setattr(supervisor, "run", run)
    result = syringa("serve", "--model", str(write_gguf(tmp_path / "m.gguf")), "--port", "0", "--threads", "1")
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[0] == "Loading m …"
    assert lines[1].startswith("  Model   m (Llama, 1M, GGUF Q4_K_M)")
    assert lines[2].startswith("  Memory  0.00 GB int8 weights + ")
    assert lines[3].startswith("  Threads 1 of ")
    assert planned == [free]


def test_serve_refuses_model_that_does_not_fit(
    error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_free_memory(monkeypatch, PROGRAM_BYTES)
    message = error_of("serve", "--model", str(write_gguf(tmp_path / "m.gguf")), "--port", "0")
    assert message.startswith("syringa: m needs ")
    assert message.endswith(" are free: free some memory, or choose a smaller model\n")


@pytest.mark.parametrize("command", [("serve", "--port", "0", "--model"), ("run",), ("chat",)])
def test_commands_refuse_context_that_does_not_fit(
    command: tuple[str, ...], syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_free_memory(monkeypatch, PROGRAM_BYTES + 3_000_000)
    question = ("hi",) if command == ("run",) else ()
    model, template = str(write_gguf(tmp_path / "m.gguf")), tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    result = syringa(
        *command, model, *question, "--chat-template", str(template), "--max-model-len", "8000", "--dtype", "int8"
    )
    assert result.status == 1
    assert "syringa: --max-model-len 8000 needs 0.00 GB of memory for its cache" in result.err
    assert result.err.rstrip().endswith("tokens fit")
    assert result.err.count("\n") == 1


def test_models_available_marks_what_fits(syringa: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    set_free_memory(monkeypatch, 4 * GB)
    result = syringa("models", "--available")
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    assert "yes" in rows["default"]
    assert "yes" in rows["llama-3.2-3b"]
    assert "no" in rows["qwen3-8b"]
    assert "4.0 GB are free here" in result.out


def test_plan_model_estimates_gpu_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_free_memory(monkeypatch, 4 * GB)
    gpus = [GpuMemory(70 * GB, 80 * GB, "0")]
    monkeypatch.setattr(startup_plan, "gpu_memories", lambda: gpus)
    spec = ModelSpec(id="m", path=str(write_gguf(tmp_path / "m.gguf")))
    plan = startup_plan.plan_model(spec, Config())
    assert plan is not None
    assert (plan.device, plan.dtype, plan.free, plan.context) == ("cuda", "bf16", 70 * GB, 8192)
    assert startup_plan.plan_model(ModelSpec(id="m", path=spec.path, device="cpu"), Config()) is not None
    monkeypatch.setattr(startup_plan, "gpu_memories", list)
    assert startup_plan.plan_model(ModelSpec(id="m", path=spec.path, device="cuda"), Config()) is None


def test_plan_model_divides_threads_between_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_free_memory(monkeypatch, 4 * GB)
    spec = ModelSpec(id="m", path=str(write_gguf(tmp_path / "m.gguf")), threads=6)
    plan = startup_plan.plan_model(spec, Config(), replicas=3)
    assert plan is not None
    assert plan.threads == 2
