"""Measure models on transformers' definitions on a GPU: `python -m bench.gpu_hf [qwen3-0.6b]`.

Uses a model that the native decoder also supports, with the shapes and workloads of `bench.gpu` and random weights, so
that the two can be compared.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from bench.gpu_models import LENGTH, MODELS
from bench.gpu_workloads import MAX_RUNNING, STEP_TOKENS, log, run_requests, workload
from syringa.engine.loading.gpu_model import wrap_gpu_model
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.models.hf import attention
from syringa.engine.models.hf import gpu as hf_gpu
from syringa.engine.models.hf import model as hf_model
from syringa.engine.models.hf.model import freeze_dynamic_rope
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.modelfiles import ModelDescription

WORKLOADS = ("decode_b1", "decode_b64", "prefill")


def build_model(name: str, device: torch.device, length: int = LENGTH, **changes: Any) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    started, settings = time.perf_counter(), MODELS[name] | changes
    attention.register()
    config = AutoConfig.for_model(**settings)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    freeze_dynamic_rope(model.eval().requires_grad_(False), length)
    layers = hf_model.probe_layers(model)
    gpu = hf_gpu.move_to_gpu(model, layers, config.vocab_size, length, device)
    description = ModelDescription(
        name=name, architecture=type(model).__name__, config=settings, max_model_len=length, end_tokens=frozenset()
    )
    return wrap_gpu_model(gpu, description, sum(p.numel() for p in model.parameters()), "bf16", started)


def main(name: str) -> None:
    loaded = build_model(name, torch.device("cuda"))
    limits = SchedulerLimits(step_tokens=STEP_TOKENS, max_running=MAX_RUNNING, max_queue=4096)
    core = EngineCore(loaded, limits, prefix_caching=False)
    graph_sizes = core.runner.cuda_graphs.sizes if core.runner else []  # type: ignore[attr-defined]
    log(f"{name} on transformers' definition, bf16: {core.pool.total:,} blocks, {len(graph_sizes)} CUDA graphs")
    for work in WORKLOADS:
        for _ in range(2):
            requests = workload(work, quick=True)
            seconds, tokens, steps = run_requests(core, requests)
            if work == "prefill":
                tokens = sum(len(request.prompt) for request in requests)
            log(f"  {work}: {tokens / seconds:,.0f} tok/s, {steps} steps, {1e3 * seconds / steps:.2f} ms each")
    core.close()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    main(sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b")
