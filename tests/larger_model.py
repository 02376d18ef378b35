"""A real model that is larger than the default one, for what 135M parameters cannot show: `make test MODELS=1`.

Qwen2.5-Coder-1.5B-Instruct Q4_K_M of the catalog, 1.1 GB. It is pulled once, where `syringa pull` stores models, and
never in CI.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syringa.modelfiles import pull

MODELS = os.environ.get("MODELS", "") not in ("", "0")
needs_larger_model = pytest.mark.skipif(not MODELS, reason="downloads a model of 1.1 GB: set MODELS=1")


def coder_model() -> Path:
    """Return the path of the model, which is downloaded if it is not here."""
    return Path(pull("qwen2.5-coder-1.5b").path)
