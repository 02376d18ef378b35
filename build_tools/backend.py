"""The build backend: setuptools, plus a compiler from PyPI on machines that have none.

The CPU kernels are C++. Where no compiler is installed, the `ziglang` wheel brings one, so that `pip install .` builds
the kernels wherever pip works. A portable build (see `compilers.is_portable_build`) always uses it.
"""

from compilers import needs_ziglang
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _with_compiler(requirements: list[str]) -> list[str]:
    return [*requirements, "ziglang"] if needs_ziglang() else requirements


def get_requires_for_build_wheel(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))
