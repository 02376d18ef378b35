"""Fetch the console's JavaScript libraries from npm at exact versions: `make vendor`.

Packages are fetched with `npm pack`, which runs none of their code. The ES module of each is copied to
`syringa/console/static/vendor/`, with bare imports rewritten to relative paths, because the console's
Content-Security-Policy allows no inline import map. `manifest.json` there lists versions, licenses and SHA-256 hashes,
which `tests/console/test_vendor.py` checks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "syringa" / "console" / "static" / "vendor"


@dataclass(frozen=True)
class Library:
    """A package at an exact version, and which of its files become which files of the vendor folder.

    `types`: the module whose types a file has, for `tsc`, from the package of the same version in package.json.
    """

    package: str
    version: str
    files: dict[str, str]
    types: dict[str, str] = field(default_factory=dict)
    append: dict[str, str] = field(default_factory=dict)


# uPlot's ES module is not minified; its minified build is a script, which an export makes a module.
LIBRARIES = (
    Library(
        "preact",
        "11.2.0",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js"},
        types={"preact.js": "preact", "preact-hooks.js": "preact/hooks"},
    ),
    Library("htm", "3.1.1", {"dist/htm.module.js": "htm.js"}, types={"htm.js": "htm"}),
    Library("@preact/signals-core", "1.14.5", {"dist/signals-core.mjs": "signals-core.js"}),
    Library("@preact/signals", "2.11.4", {"dist/signals.mjs": "signals.js"}, types={"signals.js": "@preact/signals"}),
    Library(
        "uplot",
        "1.6.32",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
        types={"uplot.js": "uplot"},
        append={"uplot.js": "export default uPlot;\n"},
    ),
    Library("marked", "18.2.0", {"lib/marked.esm.js": "marked.js"}, types={"marked.js": "marked"}),
    Library("dompurify", "3.4.17", {"dist/purify.es.mjs": "purify.js"}, types={"purify.js": "dompurify"}),
    Library(
        "@cfworker/json-schema",
        "4.1.6",
        {
            f"dist/esm/{name}.js": f"json-schema/{name}.js"
            for name in (
                "index",
                "deep-compare-strict",
                "dereference",
                "format",
                "pointer",
                "types",
                "ucs2-length",
                "validate",
                "validator",
            )
        },
        types={"json-schema/index.js": "@cfworker/json-schema"},
    ),
)

# Where a bare import leads.
MODULES = {
    "preact": "./preact.js",
    "preact/hooks": "./preact-hooks.js",
    "@preact/signals-core": "./signals-core.js",
}

DEFAULT_EXPORTS = ("htm.js", "uplot.js", "purify.js")

_BARE_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])([^"'./][^"']*)\2""")
_SOURCE_MAP = re.compile(r"\n//# sourceMappingURL=\S+\s*$")


def main() -> None:
    entries: list[dict[str, Any]] = []
    licenses: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name) / "vendor"
        fresh.mkdir()
        for library in LIBRARIES:
            package = fetch(library, Path(name))
            entries.append(copy(library, package, fresh))
            licenses.append(license_text(library, package))
        write(fresh / "manifest.json", json.dumps({"libraries": entries}, indent=2) + "\n")
        write(fresh / "LICENSES.txt", "\n\n".join(licenses))
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)
    print(f"{len(entries)} libraries in {TARGET}")


def fetch(library: Library, folder: Path) -> Path:
    """Download and unpack a package; return the folder of its files."""
    command = ["npm", "pack", "--silent", f"{library.package}@{library.version}", "--pack-destination", str(folder)]
    archive = folder / subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    unpacked = folder / archive.stem
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    return unpacked / "package"


def copy(library: Library, package: Path, target: Path) -> dict[str, Any]:
    """Copy the library's files, with relative imports and without references to source maps; return its entry."""
    hashes: dict[str, str] = {}
    for source, name in library.files.items():
        text = _SOURCE_MAP.sub("\n", (package / source).read_text())
        text = _BARE_IMPORT.sub(relative_import, text) if name.endswith(".js") else text
        text += library.append.get(name, "")
        write(target / name, text)
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
    for name, module in library.types.items():
        default = f'export {{ default }} from "{module}";\n' if name in DEFAULT_EXPORTS else ""
        write(target / name.replace(".js", ".d.ts"), f'export * from "{module}";\n{default}')
    license = read_package(package)["license"]
    return {"package": library.package, "version": library.version, "license": license, "sha256": hashes}


def relative_import(match: re.Match[str]) -> str:
    keyword, quote, module = match.groups()
    return f"{keyword}{quote}{MODULES[module]}{quote}"


def license_text(library: Library, package: Path) -> str:
    """Return the package's license files, or what its package.json says where it has none."""
    details = read_package(package)
    texts = [path.read_text().strip() for path in sorted(package.glob("LICENSE*"))]
    if not texts:
        author = details.get("author", "")
        name = author.get("name", "") if isinstance(author, dict) else author
        texts = [f"The package has no license file. License: {details['license']}. Author: {name}."]
    title = f"{library.package} {library.version} ({details['license']})"
    return "\n\n".join([f"{title}\n{'=' * len(title)}", *texts]) + "\n"


def read_package(package: Path) -> dict[str, Any]:
    details: dict[str, Any] = json.loads((package / "package.json").read_text())
    return details


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
