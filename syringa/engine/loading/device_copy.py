"""Copy weights from a mapped file to the memory of a GPU.

A direct copy reads the file on one core. Here, all of torch's threads read a part into pinned memory while the parts
before are transferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

PART_BYTES = 32 << 20
MAX_TRANSFERS = 4  # parts in pinned memory whose transfer is not waited for

_transfers: deque[torch.cuda.Event] = deque()


def copy_weight(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of a mapped file on the device. It is complete for what the device runs afterwards."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    for source, part in split_parts(tensor, target, PART_BYTES):
        # torch's host allocator reuses pinned memory only after its transfer.
        part.copy_(source.pin_memory(), non_blocking=True)
        _transfers.append(torch.cuda.current_stream(device).record_event())
        if len(_transfers) > MAX_TRANSFERS:
            _transfers.popleft().synchronize()
    return target


def split_parts(
    tensor: torch.Tensor, target: torch.Tensor, part_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of two tensors of one shape and dtype, of at most `part_bytes` each."""
    size = max(1, part_bytes // tensor.dtype.itemsize)
    return zip(tensor.reshape(-1).split(size), target.view(-1).split(size), strict=True)
