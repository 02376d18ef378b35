"""What every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# A person's run looks for new examples; CI must give the same answer to the same tree.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
