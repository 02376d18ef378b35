"""The files of the console: vendored libraries as they were fetched, their sizes, and nothing inline."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

import syringa.console
from scripts.vendor_console import LIBRARIES

STATIC = Path(syringa.console.__file__).parent / "static"
VENDOR = STATIC / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())
OWN = sorted(
    path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg") and VENDOR not in path.parents
)


_COMMENT = re.compile(r"/\*.*?\*/|^\s*//[^\n]*$", re.DOTALL | re.MULTILINE)


def compressed(paths: list[Path]) -> int:
    return sum(len(gzip.compress(path.read_bytes(), 9)) for path in paths)


def compressed_code(paths: list[Path]) -> int:
    """Return the size of files without their comments, most of which are types."""
    return sum(len(gzip.compress(_COMMENT.sub("", path.read_text()).encode(), 9)) for path in paths)


def test_vendored_files_have_the_hashes_of_the_manifest() -> None:
    hashes = {name: each for library in MANIFEST["libraries"] for name, each in library["sha256"].items()}
    found = {str(path.relative_to(VENDOR)): path for path in VENDOR.rglob("*") if path.suffix in (".js", ".css")}
    assert set(found) == set(hashes)
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == hashes


def test_manifest_and_package_json_have_the_versions_of_the_script() -> None:
    versions = {library.package: library.version for library in LIBRARIES}
    assert {each["package"]: each["version"] for each in MANIFEST["libraries"]} == versions
    packages = json.loads((STATIC.parents[2] / "package.json").read_text())["devDependencies"]
    assert versions.items() <= packages.items()
    licenses = (VENDOR / "LICENSES.txt").read_text()
    for each in MANIFEST["libraries"]:
        assert f"{each['package']} {each['version']} ({each['license']})" in licenses


def test_vendored_modules_import_files_that_are_there() -> None:
    for path in VENDOR.rglob("*.js"):
        for target in re.findall(r"""\b(?:from|import)\s*["']([^"']+)["']""", path.read_text()):
            assert target.startswith("."), (path, target)
            assert (path.parent / target).is_file(), (path, target)


def test_own_modules_import_files_that_are_there() -> None:
    for path in (each for each in OWN if each.suffix == ".js"):
        for target in re.findall(r"""^\s*(?:import|export)\b[^"';]*?["'](\.[^"']+)["'];""", path.read_text(), re.M):
            assert (path.parent / target).is_file(), (path, target)


def test_console_is_small() -> None:
    assert compressed([path for path in VENDOR.rglob("*") if path.suffix in (".js", ".css")]) <= 95_000
    assert compressed_code(OWN) <= 100_000


def test_page_has_neither_inline_scripts_nor_styles() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    assert re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page) == []


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(STATIC)))
def test_own_file_has_no_style_attribute_and_one_client(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"""\sstyle=["'$]\{?["'`]""", text) == []  # as an object it goes through the CSSOM
    assert path.name == "api.js" or not re.search(r"(?<![.\w])fetch\(|XMLHttpRequest|EventSource|WebSocket", text)
    assert not re.search(r"\beval\(|new Function\(|innerHTML|dangerouslySetInnerHTML", text)
