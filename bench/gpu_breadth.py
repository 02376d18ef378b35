"""How fast models on transformers' definitions are on a GPU: `python -m bench.gpu_breadth [qwen3-0.6b]`.

The model is one that the native decoder would run, so that the two can be compared: its shapes and workloads are
`bench.gpu`'s, its weights random.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from bench.gpu import LENGTH, MAX_RUNNING, MODELS, STEP_TOKENS, drain, say, workload
from syringa.engine.loading.loader import LoadedModel, on_gpu
from syringa.engine.models.hf import attention
from syringa.engine.models.hf import gpu as breadth_gpu
from syringa.engine.models.hf import model as breadth
from syringa.engine.models.hf.rotary import fix_rotary
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.modelfiles import ModelDescription

WORKLOADS = ("decode_b1", "decode_b64", "prefill")


def build(name: str, device: torch.device, length: int = LENGTH, **changes: Any) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    started, settings = time.perf_counter(), MODELS[name] | changes
    attention.register()
    config = AutoConfig.for_model(**settings)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    fix_rotary(model.eval().requires_grad_(False), length)
    layers = breadth._probe(model)
    gpu = breadth_gpu.on_device(model, layers, config.vocab_size, length, device)
    description = ModelDescription(
        name=name, architecture=type(model).__name__, config=settings, max_model_len=length, end_tokens=frozenset()
    )
    return on_gpu(gpu, description, sum(p.numel() for p in model.parameters()), "bf16", started)


def main(name: str) -> None:
    loaded = build(name, torch.device("cuda"))
    limits = Limits(step_tokens=STEP_TOKENS, max_running=MAX_RUNNING, max_queue=4096)
    core = EngineCore(loaded, limits, prefix_caching=False)
    recorded = core.ahead.runner.graphs.sizes if core.ahead else []  # type: ignore[attr-defined]
    say(f"{name} on transformers' definition, bf16: {core.pool.total:,} blocks, {len(recorded)} graphs")
    for work in WORKLOADS:
        for _ in range(2):
            requests = workload(work, quick=True)
            seconds, tokens, steps = drain(core, requests)
            if work == "prefill":
                tokens = sum(len(request.prompt) for request in requests)
            say(f"  {work}: {tokens / seconds:,.0f} tok/s, {steps} steps, {1e3 * seconds / steps:.2f} ms each")
    core.close()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    main(sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b")
