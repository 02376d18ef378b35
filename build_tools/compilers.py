"""C++ compilers and kernel variants of the build.

No variant is compiled for the building machine's own processor: the engine chooses one when it starts.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX_VNNI = [*AVX2, "-mavxvnni"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
COMPILE_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-w", "-c"]
LINK_FLAGS = ["-O3", "-shared", "-pthread", "-Wl,-S"]  # -S: no debug information
GLIBC = "2.28"  # the oldest version that PyTorch's wheels support


def is_portable_build() -> bool:
    """Return whether the kernels must run on other machines than this one (`SYRINGA_PORTABLE_BUILD=1`).

    A portable build uses the compiler of the `ziglang` wheel, which links against an old glibc and contains its own
    C++ library, and fails when a variant does not compile.
    """
    return os.environ.get("SYRINGA_PORTABLE_BUILD", "") not in ("", "0")


def system_compiler() -> list[str] | None:
    """Return the command of the installed compiler: `$CXX`, or the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    return None


def needs_ziglang() -> bool:
    return is_portable_build() or system_compiler() is None


def find_compiler() -> list[str] | None:
    """Return the command of the compiler to build with; None where there is none."""
    if not needs_ziglang():
        return system_compiler()
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", *ziglang_target()]
    return None


def ziglang_target() -> list[str]:
    """Return the flags without which ziglang compiles for the processor and the glibc of this machine."""
    if platform.libc_ver()[0] == "glibc" and platform.machine() in ("x86_64", "aarch64"):
        return ["-target", f"{platform.machine()}-linux-gnu.{GLIBC}"]
    return ["-mcpu=baseline"]


def variants() -> dict[str, list[str]]:
    """Return the kernel variants for this kind of machine, by name, with their compiler flags."""
    if platform.machine() in ("x86_64", "AMD64"):
        return {
            "avx512bf16": [*AVX512, "-mavx512bf16"],
            "avx512": AVX512,
            "avxvnni": AVX_VNNI,
            "avx2": AVX2,
            "base": [],
        }
    return {"base": []}


def build_commands(compiler: list[str], flags: list[str], source: Path, output: Path) -> list[list[str]]:
    """Return the commands that compile and link one library.

    Linking has no variant flags: ziglang would compile its C++ library again for each set of them.
    """
    compiled = output.with_suffix(".o")
    return [
        [*compiler, *COMPILE_FLAGS, *flags, str(source), "-o", str(compiled)],
        [*compiler, *LINK_FLAGS, str(compiled), "-o", str(output)],
    ]
