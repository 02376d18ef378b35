"""Memory of the kernels: what happens without it, and what they read of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from syringa.engine.cpu.features import cpu_flags
from syringa.engine.cpu.native import FOLDER, REQUIRED_FLAGS

VARIANTS = [
    name for name, flags in REQUIRED_FLAGS.items() if flags <= cpu_flags() and (FOLDER / f"kernels_{name}.so").exists()
]
pytestmark = [
    pytest.mark.skipif(not VARIANTS, reason="no kernels were built: there was no compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="limits memory and reads /proc as Linux does"),
]
ROOT = Path(__file__).parents[3]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def run_case(name: str, variant: str) -> None:
    command = [sys.executable, "-m", "tests.engine.cpu.native_memory", name, variant]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("variant", VARIANTS[:1])
@pytest.mark.parametrize("name", ["quantize", "read"])
def test_kernels_without_memory_raise_memory_error(name: str, variant: str) -> None:
    run_case(name, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_do_not_read_beyond_a_tensor(variant: str) -> None:
    run_case("overread", variant)


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="needs huge pages")
def test_weights_are_on_huge_pages() -> None:
    run_case("huge_pages", VARIANTS[0])
