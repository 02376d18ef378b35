from __future__ import annotations

import numpy as np
import torch

from syringa.engine.gpu.transfer import upload
from tests.engine.gpu.tiny_models import CPU


def test_upload_keeps_values_and_alignment() -> None:
    arrays = [np.arange(3, dtype=np.int32), np.array([-1], dtype=np.int64), np.array([[0.5], [2.0]]), np.float32([[7]])]
    for array, tensor in zip(arrays, upload(arrays, CPU), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.data_ptr() % 16 == 0
