from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.gpu.ops.base import ReferenceOps
from tests.engine.gpu.paged import random


@pytest.mark.skipif(missing_triton() is not None, reason="no Triton")
@pytest.mark.parametrize("width", [64, 1500])
def test_rows_are_those_of_known_and_of_drawn_tokens(width: int) -> None:
    from syringa.engine.gpu.kernels.embedding import embed

    table = random(50, width)
    tokens = torch.tensor([7, -1, 0, 49, -1], dtype=torch.int32)
    sources = torch.tensor([-1, 2, -1, -1, 0], dtype=torch.int32)
    drawn = torch.tensor([-1, 8, 31])  # nothing could be drawn in the first row
    found = embed(table, tokens, sources, drawn)
    assert torch.equal(found, table[torch.tensor([7, 31, 0, 49, 0])])
    assert torch.equal(found, ReferenceOps().embed(table, tokens, sources, drawn))
