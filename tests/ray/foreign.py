"""Programs that are no part of a cluster, and try to use its Ray. Each prints why it failed."""

from __future__ import annotations

import sys


def connect(address: str) -> None:
    """Run code in the cluster as a driver."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        print(ray.get(ray.remote(lambda: "ran").remote()))
    except Exception as error:
        print(type(error).__name__, error)


def look(address: str) -> None:
    """Ask the head for its nodes."""
    from syringa.ray import internals

    internals.CONNECT_SECONDS = 120.0  # a busy machine
    try:
        print(len(internals.HeadClient(address).nodes()), "nodes")
    except internals.HeadUnavailable as error:
        print(type(error).__name__, error)


if __name__ == "__main__":
    {"connect": connect, "look": look}[sys.argv[1]](sys.argv[2])
