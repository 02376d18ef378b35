"""Compare the models of the catalog with the Hugging Face Hub: `python -m scripts.check_catalog`. Needs a network.

Prints one line per model, and exits with status 1 if a file is missing or its size is off by more than 2 %.
"""

from __future__ import annotations

import sys

from syringa.errors import ModelError
from syringa.modelfiles import catalog
from syringa.modelfiles.hub import list_files
from syringa.modelfiles.variants import HubName, select_files

TOLERANCE = 0.02


def main() -> int:
    wrong = 0
    for model in catalog.CATALOG:
        if not isinstance(model.source, HubName):
            continue
        try:
            sizes = {file.name: file.size for file in list_files(model.source)}
            size = sum(sizes[name] for name in select_files(model.source, list(sizes)))
        except ModelError as error:
            print(f"{model.name}: {error.message}")
            wrong += 1
            continue
        matches = abs(size - model.bytes) <= TOLERANCE * size
        wrong += not matches
        print(f"{model.name}: {size:,} bytes" + ("" if matches else f", and not {model.bytes:,} as in the catalog"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
