"""What the agent of a node tells the bridge."""

from __future__ import annotations

import msgspec

from syringa.fleet.provider import OwnerLoad


class NodeObservation(msgspec.Struct, frozen=True):
    owner_load: OwnerLoad | None = None  # None: not measured yet
