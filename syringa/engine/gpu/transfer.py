"""Copies between host and device that do not wait for work already queued on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from syringa.engine.vision.step_images import StepImages

_ALIGNMENT = 16  # bytes; kernels are compiled for pointers with this alignment

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: Sequence[np.ndarray], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Copy arrays to the device in one transfer and return them as tensors.

    `into` is an optional device buffer (uint8) that receives the arrays one after the other.
    """
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    pinned = device.type == "cuda"
    # torch's caching host allocator reuses pinned memory only after the copy has completed.
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    buffer, offset = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        buffer[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += size
    target = torch.empty_like(host, device=device, pin_memory=False) if into is None else into[: len(host)]
    target.copy_(host, non_blocking=True)
    return packed_views(target, [(array.shape, array.dtype) for array in arrays])


def packed_views(buffer: torch.Tensor, layout: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[torch.Tensor]:
    """Return views of the given shapes and dtypes into a buffer that `upload` has packed."""
    views, offset = [], 0
    for shape, dtype in layout:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        views.append(buffer[offset : offset + size].view(_TORCH_DTYPES[dtype]).view(shape))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return views


def copy_images_to_device(images: StepImages | None, device: torch.device) -> StepImages | None:
    """Return a step's image inputs on the device.

    Image embeddings are cached on the host, so that device memory is left to the KV cache; a step copies the rows it
    needs from pinned memory.
    """
    if images is None:
        return None
    pinned = device.type == "cuda"
    embeddings: list[tuple[int, torch.Tensor]] = []
    if images.embeddings:
        starts, parts = zip(*images.embeddings, strict=True)
        sizes = [len(part) for part in parts]
        host = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pinned)
        on_device = torch.cat(parts, out=host).to(device, non_blocking=True)
        embeddings = list(zip(starts, on_device.split(sizes), strict=True))
    positions = images.mrope_positions
    if positions is not None:
        positions = (positions.pin_memory() if pinned else positions).to(device, non_blocking=True)
    bidirectional = [replace(rows, table=rows.table.to(device)) for rows in images.bidirectional]
    return StepImages(embeddings, bidirectional, positions)


class HostCopy:
    """Copy tensors to the host asynchronously, and wait for exactly these copies."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy and return the host tensor, which is valid once `synchronize` has returned."""
        if self._event is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def record(self) -> None:
        """Mark the end of the copies: call it after the last `copy`."""
        if self._event is not None:
            self._event.record()

    def synchronize(self) -> None:
        """Wait for the copies, not for work queued after `record`."""
        if self._event is not None:
            self._event.synchronize()
