"""The interface of what the servers of a cluster share. The coordinator of each server uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Renewal(NamedTuple):
    decides: bool  # whether this server has the lease
    overrides: Mapping[str, bool]  # pools that operators have opened (True) or closed


class ClusterRecords(Protocol):
    """Where this is kept: a database, which the engine does not know. Its methods may block, and may raise."""

    def renew(self, seconds: float, changes: Mapping[str, bool | None]) -> Renewal:
        """Count among the servers of the cluster for so long, and take the lease if it is free, or renew it.

        `changes`: what operators want of pools, to be stored; None: that they follow their schedules.
        """
        ...

    def leave(self, seconds: float) -> bool:
        """Count no longer among the servers. Return whether there are others; without, keep the lease for so long."""
        ...

    def close(self) -> None:
        """Give the lease back and close what was opened."""
        ...
