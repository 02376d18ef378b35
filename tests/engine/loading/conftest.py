from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def load_gpu_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a folder as on a GPU with FP8, with all checks and reference operations."""
    import torch

    from syringa.engine.gpu import device as gpu_device
    from syringa.engine.gpu.ops import base as ops_module
    from syringa.engine.loading.gpu_model import load_on_gpu
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.modelfiles import describe, locate

    monkeypatch.setattr(ops_module, "choose_ops", lambda *_, **__: ops_module.ReferenceOps())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_device, "free_memory", lambda device: 8 << 30)

    def load(folder: Path, **options: Any) -> Any:
        files = locate(str(folder))
        return load_on_gpu(LoadOptions(str(folder), **options), files, describe(files), torch.device("cpu"), None)

    return load
