"""A fake of the parts of FlashInfer's interface that are used, computed by the reference from the same arguments."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from syringa.engine.gpu.kernels import reference


class BatchPrefillWithPagedKVCacheWrapper:
    made: list[BatchPrefillWithPagedKVCacheWrapper]
    failure: Exception | None

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto", **rest: Any
    ) -> None:
        assert (kv_layout, backend, rest) == ("HND", "fa3", {})
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = self.runs = 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        if self.failure:
            raise self.failure
        assert causal, "rows must not see later ones"
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens):
            assert each is not None
            assert each.dtype == torch.int32
            assert each.dim() == 1
            assert each.device.type == "cpu"  # also the device of the tests
        counts = paged_kv_indptr.diff()
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        lengths = (counts - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(lengths, seq_lens)
        self.tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for s, part in enumerate(paged_kv_indices.split(counts.tolist())):
            self.tables[s, : len(part)] = part
        self.starts, self.first = qo_indptr, lengths - qo_indptr.diff()
        self.heads = num_qo_heads, num_kv_heads
        self.size, self.page_size = head_dim_qk, page_size
        self.window, self.scale = window_left + 1, sm_scale
        self.dtypes = q_data_type, kv_data_type
        self.plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert q.shape == out.shape == (int(self.starts[-1]), self.heads[0], self.size)
        assert keys.shape[1:] == values.shape[1:] == (self.heads[1], self.page_size, self.size)
        assert self.dtypes == (q.dtype, keys.dtype)
        assert keys.stride() == values.stride()
        result = reference.paged_attention(
            q, keys, values, self.tables, self.starts, self.first, window=self.window, scale=self.scale
        )
        self.runs += 1
        return out.copy_(result)


def fake_flashinfer() -> Any:
    """Return a new fake module with its own state: `made` wrappers, and the `failure` that `plan` raises."""
    module: Any = ModuleType("flashinfer")
    state = {"made": [], "failure": None}
    wrapper = BatchPrefillWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = type(wrapper.__name__, (wrapper,), state)
    return module
