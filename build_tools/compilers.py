"""Finds a C++ compiler, and knows which variants of the kernels to build with it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys

AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-w"]


def system_compiler() -> list[str] | None:
    """The command of an installed compiler: $CXX, or the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    return None


def any_compiler() -> list[str] | None:
    """As `system_compiler`, or the one in the `ziglang` wheel."""
    if command := system_compiler():
        return command
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def variants() -> dict[str, list[str]]:
    """Kernel variants for this kind of machine, by name, with the flags that make them."""
    if platform.machine() in ("x86_64", "AMD64"):
        return {"avx512bf16": [*AVX512, "-mavx512bf16"], "avx512": AVX512, "avx2": ["-mavx2", "-mfma"], "base": []}
    return {"base": []}
