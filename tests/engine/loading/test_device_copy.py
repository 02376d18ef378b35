from __future__ import annotations

import pytest
import torch

from syringa.engine.loading.device_copy import copy_weight, split_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0), (7, 33), (3, 5, 64)])
def test_parts_cover_a_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).mul(9).to(dtype)
    target = torch.empty(shape, dtype=dtype)
    parts = list(split_parts(tensor, target, 64))
    for source, part in parts:
        assert source.nbytes <= 64
        part.copy_(source)
    assert torch.equal(target.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_parts_of_a_view_are_in_its_order() -> None:
    tensor = torch.arange(48.0).view(6, 8).T[1:]
    target = torch.empty(tensor.shape)
    for source, part in split_parts(tensor, target, 32):
        part.copy_(source)
    assert torch.equal(target, tensor)


def test_weights_of_a_cpu_are_not_copied() -> None:
    tensor = torch.randn(4)
    assert copy_weight(tensor, "cpu") is tensor
