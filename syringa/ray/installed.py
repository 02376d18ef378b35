"""Whether the Ray that is installed is one that was tested. This module does not import it."""

from __future__ import annotations

from importlib import metadata

from syringa.errors import StartupError

VERSIONS = ("2.60",)  # the extra `ray` of pyproject.toml


def check_installed() -> None:
    """Raise `StartupError` if Ray is missing, or is of a version that was not tested."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise StartupError("a cluster needs Ray: pip install 'syringa[ray]'") from None
    if version.rpartition(".")[0] not in VERSIONS:
        tested = ", ".join(f"{each}.*" for each in VERSIONS)
        raise StartupError(f"a cluster needs Ray {tested}, and {version} is installed: pip install 'syringa[ray]'")
