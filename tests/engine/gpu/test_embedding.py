from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.gpu.ops.base import ReferenceOps
from tests.engine.gpu.kernel_inputs import random


@pytest.mark.skipif(missing_triton() is not None, reason="no Triton")
@pytest.mark.parametrize("width", [64, 1500])
def test_embed_looks_up_host_and_sampled_tokens(width: int) -> None:
    from syringa.engine.gpu.kernels.embedding import embed

    table = random(50, width)
    tokens = torch.tensor([7, -1, 0, 49, -1], dtype=torch.int32)
    sources = torch.tensor([-1, 2, -1, -1, 0], dtype=torch.int32)
    sampled = torch.tensor([-1, 8, 31])  # the first row has no sampled token
    rows = embed(table, tokens, sources, sampled)
    assert torch.equal(rows, table[torch.tensor([7, 31, 0, 49, 0])])
    assert torch.equal(rows, ReferenceOps().embed(table, tokens, sources, sampled))
