"""Arrays to the device and tokens back, without waiting for what is under way there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNED = 16  # bytes; kernels are compiled for pointers that are multiples of it

_KINDS = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: Sequence[np.ndarray], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The arrays on the device, by a single copy. `into`: bytes there that they are to lie in, one after the other."""
    sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays]
    pinned = device.type == "cuda"
    # Pinned memory is kept and given out again, by torch, once the copy is done.
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    room, offset = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        room[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += size
    target = torch.empty_like(host, device=device, pin_memory=False) if into is None else into[: len(host)]
    target.copy_(host, non_blocking=True)
    return views(target, [(array.shape, array.dtype) for array in arrays])


def views(memory: torch.Tensor, kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[torch.Tensor]:
    """Tensors of these shapes and types, in the order in which `upload` lays them out."""
    found, offset = [], 0
    for shape, kind in kinds:
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        found.append(memory[offset : offset + size].view(_KINDS[kind]).view(shape))
        offset += -(-size // _ALIGNED) * _ALIGNED
    return found


class Homeward:
    """Tensors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the tensor will lie on the host, once `wait` has returned."""
        if self._event is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def depart(self) -> None:
        """All is on its way."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits for this alone, not for what was started after it."""
        if self._event is not None:
            self._event.synchronize()
