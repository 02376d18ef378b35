"""The GPU decoder of Gemma with the kernels, by Triton's interpreter, compared with `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from syringa.engine.gpu.decoder import GpuDecoder
from syringa.engine.gpu.ops.batch_invariant_ops import BatchInvariantOps
from syringa.engine.gpu.ops.triton_ops import TritonOps
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.native_models import FULL, GEMMA, SLIDING
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save


@pytest.mark.parametrize("ops", [TritonOps, BatchInvariantOps])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_kernels_of_gemma_match_transformers(tmp_path: Path, name: str, ops: type[TritonOps]) -> None:
    family, fields = GEMMA[name]
    fields = fields | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    hf_model = save(tmp_path, AutoConfig.for_model(family, **(SIZES | fields)))
    loaded = load_tiny_gpu_model(tmp_path, ops=ops())
    assert isinstance(loaded.gpu and loaded.gpu.decoder, GpuDecoder)
    prompts = [PROMPTS[0][:21], PROMPTS[1]]
    # A step of prompts, one with decode and prefill rows, and steps of single tokens.
    for chunk in (0, 3):
        for logits, prompt in zip(run(loaded, prompts, chunk=chunk), prompts, strict=True):
            assert difference(logits, reference(hf_model, prompt)) < 1e-3
    decoded = run(loaded, [prompt[:5] for prompt in prompts], chunk=1)[0]
    assert difference(decoded, reference(hf_model, prompts[0])[:5]) < 1e-3
