"""Build of the CPU kernels: one library per instruction set, beside their sources. The rest is in pyproject.toml."""

import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).parent / "build_tools"))
from compilers import build_commands, find_compiler, is_portable_build, variants

BUILD_TOOLS = Path(__file__).parent / "build_tools"
SOURCES = Path(__file__).parent / "syringa" / "engine" / "cpu" / "native"


def build_kernels(target: Path, keep_current: bool = False) -> None:
    """Compile every variant into the target folder; optionally keep the libraries that are newer than all sources."""
    inputs = [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), *BUILD_TOOLS.glob("*.py"), Path(__file__)]
    newest = max(path.stat().st_mtime for path in inputs)
    compiler = find_compiler()
    if compiler is None and is_portable_build():
        raise SystemExit("a portable build needs the ziglang package: pip install ziglang")
    if compiler is None:
        print("warning: no C++ compiler found: the engine will run without its CPU kernels, slower and in bf16 or fp32")
        return
    target.mkdir(parents=True, exist_ok=True)
    for name, flags in variants().items():
        # Renamed at the end: a running engine keeps the library that it has loaded.
        output = target / f"kernels_{name}.so"
        if keep_current and output.exists() and output.stat().st_mtime > newest:
            continue
        with tempfile.TemporaryDirectory(dir=target, prefix=".build-") as folder:
            fresh = Path(folder) / output.name
            try:
                for command in build_commands(compiler, flags, SOURCES / "kernels.cpp", fresh):
                    print(" ".join(command), flush=True)
                    subprocess.run(command, check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                if is_portable_build():
                    raise SystemExit(f"the {name} kernels did not compile:\n{error.stderr}") from error
                print(f"warning: the {name} kernels did not compile:\n{error.stderr}")
            else:
                fresh.replace(output)


class BuildPy(build_py):
    def run(self):
        super().run()
        build_kernels(Path(self.build_lib) / "syringa" / "engine" / "cpu" / "native")


class EditableWheel(editable_wheel):
    def run(self):
        build_kernels(SOURCES, keep_current=True)
        super().run()


class BdistWheel(bdist_wheel):
    def get_tag(self):
        # The kernels are loaded with ctypes: they depend on the platform, but not on the Python version or its ABI.
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True  # the wheel holds machine code, so it must carry a platform tag


setup(
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel, "bdist_wheel": BdistWheel},
)
