"""Tables of documentation pages that benchmarks write, between markers such as `<!-- name -->`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def replace_section(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what is between the markers of `name`. Raises `ValueError` if they are missing."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{page} has no markers {begin} and {end}")
    page.write_text(pattern.sub(lambda _: "\n".join([begin, *lines, end]), text), encoding="utf-8")
