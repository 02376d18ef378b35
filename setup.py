"""Builds the CPU kernels, one library per instruction set, beside their sources. The rest is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).parent / "build_tools"))
from compilers import FLAGS, any_compiler, variants

SOURCES = Path(__file__).parent / "syringa" / "engine" / "cpu" / "native"


def build_kernels(target: Path) -> None:
    compiler = any_compiler()
    if compiler is None:
        print("warning: no C++ compiler found: the engine will run without its CPU kernels, slower and in bf16 or fp32")
        return
    target.mkdir(parents=True, exist_ok=True)
    for name, flags in variants().items():
        # Written beside and then renamed: a running engine keeps the library that it has loaded.
        output = target / f"kernels_{name}.so"
        fresh = output.with_suffix(".new")
        command = [*compiler, *FLAGS, *flags, str(SOURCES / "kernels.cpp"), "-o", str(fresh)]
        print(" ".join(command))
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print(f"warning: the {name} kernels did not compile:\n{result.stderr}")
        else:
            fresh.replace(output)


class BuildPy(build_py):
    def run(self):
        super().run()
        build_kernels(Path(self.build_lib) / "syringa" / "engine" / "cpu" / "native")


class EditableWheel(editable_wheel):
    def run(self):
        build_kernels(SOURCES)
        super().run()


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True  # the wheel holds machine code, so it must carry a platform tag


setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
