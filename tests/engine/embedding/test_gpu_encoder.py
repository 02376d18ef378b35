"""The encoder of a GPU, run on the CPU with attention in PyTorch, compared with transformers' own output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from syringa.engine.embedding import gpu_encoder
from syringa.engine.embedding.batch import pack_inputs
from syringa.engine.embedding.encoder import Encoder
from syringa.engine.embedding.gpu_encoder import GRAPH_INPUTS, GpuEncoder, VarlenAttention, find_varlen_attention
from syringa.engine.embedding.heads import PooledModel
from tests.engine.embedding.tiny_encoders import INPUTS, load, reference, save_encoder, vectors

CPU = torch.device("cpu")
FAMILIES = [("Bert", "mean_tokens"), ("Roberta", "cls_token")]


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_keys: int,
) -> torch.Tensor:
    """Attend as `varlen_attn` does, input by input."""
    assert torch.equal(starts, key_starts)
    assert starts.dtype == torch.int32
    assert int(starts[-1]) == len(q)
    assert longest == longest_keys >= int(starts.diff().max())
    out = torch.full_like(q, torch.nan)
    for first, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        parts = (each[first:end].transpose(0, 1) for each in (q, k, v))
        out[first:end] = F.scaled_dot_product_attention(*parts).transpose(0, 1)
    return out


def model_of(folder: Path, family: str, pooling: str, attention: VarlenAttention | None) -> tuple[PooledModel, object]:
    """Return a saved model whose encoder is that of a GPU, and transformers' definition of it."""
    padding = {"pad_token_id": 1} if family == "Roberta" else {}
    tiny = save_encoder(folder, family, pooling=pooling, **padding)
    model = load(tiny.folder, "bf16", native_kernels=False).model
    assert isinstance(model, PooledModel)
    assert isinstance(model.encoder, Encoder)
    of_cpu = model.encoder
    model.encoder = GpuEncoder(of_cpu.config, of_cpu.embedding, of_cpu.layers, attention)
    return model, tiny.model


@pytest.mark.parametrize("attention", [varlen_attention, None], ids=["packed", "padded"])
@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_vectors_are_close_to_those_of_transformers(
    tmp_path: Path, family: str, pooling: str, attention: VarlenAttention | None
) -> None:
    model, definition = model_of(tmp_path, family, pooling, attention)
    cosines = (vectors(model, INPUTS) * reference(definition, INPUTS, pooling)).sum(1)
    assert float(cosines.min()) > 0.999


@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_graphs_pad_steps_without_changing_their_vectors(tmp_path: Path, family: str, pooling: str) -> None:
    model, _ = model_of(tmp_path, family, pooling, varlen_attention)
    batches = [[[5, 6, 7]], INPUTS, [INPUTS[0][:16]], [[9, 8]] * GRAPH_INPUTS]
    expected = [vectors(model, inputs) for inputs in batches]
    assert isinstance(model.encoder, GpuEncoder)
    model.encoder.capture_graphs()
    for inputs, alone in zip(batches, expected, strict=True):
        cosines = (vectors(model, inputs) * alone).sum(1)
        assert float(cosines.min()) > 0.9999


def test_graphs_hold_small_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_of(tmp_path, "Bert", "mean_tokens", varlen_attention)
    monkeypatch.setattr(gpu_encoder, "GRAPH_TOKENS", [4, 32])
    assert isinstance(model.encoder, GpuEncoder)
    model.encoder.capture_graphs()
    graphs = model.encoder._graphs
    assert graphs is not None

    def holds(*lengths: int) -> bool:
        batch = pack_inputs([[5] * length for length in lengths])
        found = graphs.run([batch.tokens, batch.types, batch.positions], batch.starts)
        assert found is None or found.shape == (sum(lengths), model.encoder.config.hidden)
        return found is not None

    assert holds(32)
    assert holds(3)
    assert holds(*[1] * GRAPH_INPUTS)
    assert not holds(33)
    assert not holds(*[1] * (GRAPH_INPUTS + 1))


def test_no_graphs_without_attention_over_packed_inputs(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path, "Bert", "mean_tokens", None)
    assert isinstance(model.encoder, GpuEncoder)
    model.encoder.capture_graphs()
    assert model.encoder._graphs is None
    assert np.isfinite(vectors(model, INPUTS).numpy()).all()


def test_attention_over_packed_inputs_needs_heads_and_a_gpu_that_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")  # of PyTorch 2.10
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert find_varlen_attention(64, CPU) is not None
    assert find_varlen_attention(20, CPU) is None
    assert find_varlen_attention(264, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_varlen_attention(64, CPU) is None
