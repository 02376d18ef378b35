"""What products with quantized blocks prefetch: counted in a program that is compiled with the kernels' headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from syringa.engine.cpu.native import FOLDER

SOURCE = Path(__file__).with_name("count_prefetches.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_products_prefetch_one_chunk_for_each_chunk(tmp_path: Path) -> None:
    program = tmp_path / "count"
    flags = ["-O1", "-std=c++17", "-pthread", "-w", f"-I{FOLDER}"]
    subprocess.run([str(COMPILER), *flags, str(SOURCE), "-o", str(program)], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert len(output.splitlines()) == 12
    for line in output.splitlines():
        rows, prefetches, lines, to_l1 = map(int, line.split())
        assert lines <= prefetches < 2 * lines, line  # whole calls of the kernel: up to a chunk's strips more
        assert to_l1 == (rows == 1), line
