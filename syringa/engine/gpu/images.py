"""A step's pictures on their way to the device.

What the vision tower has made of images waits on the host, however many requests hold on to it: the device's memory is
the cache's. A step copies the rows that it needs from pinned memory, so that the host does not wait for the last step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from syringa.engine.vision.layout import StepPictures


def send_pictures(placed: StepPictures | None, device: torch.device) -> StepPictures | None:
    """The same on the device."""
    if placed is None:
        return None
    pinned = device.type == "cuda"
    fills: list[tuple[int, torch.Tensor]] = []
    if placed.fills:
        begins, parts = zip(*placed.fills, strict=True)
        sizes = [len(part) for part in parts]
        host = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pinned)
        sent = torch.cat(parts, out=host).to(device, non_blocking=True)
        fills = list(zip(begins, sent.split(sizes), strict=True))
    positions = placed.positions
    if positions is not None:
        positions = (positions.pin_memory() if pinned else positions).to(device, non_blocking=True)
    joint = [replace(rows, table=rows.table.to(device)) for rows in placed.joint]
    return StepPictures(fills, joint, positions)
