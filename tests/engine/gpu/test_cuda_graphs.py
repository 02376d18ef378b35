from __future__ import annotations

from syringa.engine.gpu.cuda_graphs import CudaGraphRunner, graph_batch_sizes
from tests.engine.gpu.tiny_models import CPU


def test_graph_batch_sizes_end_with_maximum() -> None:
    assert graph_batch_sizes(256)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_batch_sizes(256)[-1] == 256
    assert graph_batch_sizes(5) == [1, 2, 4, 5]
    assert graph_batch_sizes(300)[-2:] == [288, 300]
    graphs = CudaGraphRunner([1, 2, 4, 8], lambda _: None, CPU)
    assert [graphs.size_for(n) for n in (1, 3, 8, 9)] == [1, 4, 8, None]
