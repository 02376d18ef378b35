"""Embedding models and cross-encoders, compared with transformers' own output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from syringa.engine.embedding.hf import HFEncoder
from syringa.engine.embedding.native_ops import FusedEncoder
from syringa.errors import ConfigError, ModelError
from tests.engine.embedding.tiny_encoders import (
    INPUTS,
    POOLINGS,
    TinyEncoder,
    load,
    reference,
    save_encoder,
    scores,
    vectors,
    write_modules,
)

Saved = Callable[..., TinyEncoder]
NATIVE = [("Bert", "mean_tokens"), ("Roberta", "cls_token"), ("XLMRoberta", "mean_tokens"), ("Qwen3", "lasttoken")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a model of a family, saved once."""
    known: dict[Any, TinyEncoder] = {}

    def save(family: str, **options: Any) -> TinyEncoder:
        key = (family, *sorted(options.items()))
        if key not in known:
            padding = {"pad_token_id": 1} if "Roberta" in family or family == "MPNet" else {}
            known[key] = save_encoder(tmp_path_factory.mktemp(family), family, **options, **padding)
        return known[key]

    return save


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize(("family", "pooling"), NATIVE)
def test_native_model_equals_transformers_in_fp32(
    saved: Saved, family: str, pooling: str, native_kernels: bool
) -> None:
    tiny = saved(family, pooling=pooling)
    got = vectors(load(tiny.folder, "fp32", native_kernels=native_kernels).model, INPUTS)
    torch.testing.assert_close(got, reference(tiny.model, INPUTS, pooling), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize(("family", "pooling"), NATIVE)
def test_native_model_is_close_to_transformers_in_other_dtypes(
    saved: Saved, family: str, pooling: str, dtype: str
) -> None:
    tiny = saved(family, pooling=pooling)
    cosine = (vectors(load(tiny.folder, dtype).model, INPUTS) * reference(tiny.model, INPUTS, pooling)).sum(1)
    assert float(cosine.min()) > 0.999


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
@pytest.mark.parametrize(("family", "pooling"), NATIVE)
def test_native_model_gives_an_input_the_same_bits_in_any_batch(
    saved: Saved, family: str, pooling: str, dtype: str
) -> None:
    model = load(saved(family, pooling=pooling).folder, dtype).model
    alone = torch.cat([vectors(model, [tokens]) for tokens in INPUTS])
    assert torch.equal(vectors(model, INPUTS), alone)
    assert torch.equal(vectors(model, INPUTS[::-1]).flip(0), alone)


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_of_the_folder_is_applied(saved: Saved, pooling: str, native_kernels: bool) -> None:
    tiny = saved("Bert", pooling=pooling)
    got = vectors(load(tiny.folder, "fp32", native_kernels=native_kernels).model, INPUTS)
    torch.testing.assert_close(got, reference(tiny.model, INPUTS, pooling), atol=2e-5, rtol=0)


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    tiny = save_encoder(tmp_path, "Bert", pooling="mean_tokens")
    write_modules(tmp_path, "mean_tokens", ("Dense", "2_Dense"))
    (tmp_path / "2_Dense").mkdir()
    weight, bias = torch.randn(24, 64, generator=torch.Generator().manual_seed(2)), torch.linspace(-1, 1, 24)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    (tmp_path / "2_Dense" / "config.json").write_text(
        '{"in_features": 64, "out_features": 24, "bias": true, '
        '"activation_function": "torch.nn.modules.activation.Tanh"}'
    )
    with torch.inference_mode():
        pooled = [tiny.model(input_ids=torch.tensor([each])).last_hidden_state[0].mean(0) for each in INPUTS]
    expected = torch.nn.functional.normalize(torch.tanh(torch.stack(pooled) @ weight.T + bias), dim=1)
    loaded = load(tmp_path, "fp32")
    assert loaded.info.dimensions == 24
    torch.testing.assert_close(vectors(loaded.model, INPUTS), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta"])
def test_cross_encoder_equals_transformers_and_tells_the_texts_of_a_pair(saved: Saved, family: str) -> None:
    types = {"type_vocab_size": 2} if family == "Bert" else {"type_vocab_size": 1}
    tiny = saved(family, labels=1 if family == "Bert" else 3, **types)
    seconds = [len(tokens) // 2 + 1 for tokens in INPUTS] if family == "Bert" else None
    loaded = load(tiny.folder, "fp32")
    assert (loaded.info.kind, loaded.info.dimensions) == ("score", 1 if family == "Bert" else 3)
    expected = scores(tiny.model, INPUTS, seconds)
    torch.testing.assert_close(vectors(loaded.model, INPUTS, seconds), expected, atol=5e-5, rtol=0)
    if seconds:
        assert not torch.allclose(vectors(loaded.model, INPUTS), expected, atol=1e-3)


def test_pairs_do_not_change_models_with_one_token_type(saved: Saved) -> None:
    model = load(saved("Roberta", labels=3, type_vocab_size=1).folder, "int8").model
    assert torch.equal(vectors(model, INPUTS, [1] * len(INPUTS)), vectors(model, INPUTS))


def test_tokens_of_the_padding_do_not_count_as_positions_of_roberta(saved: Saved) -> None:
    tiny = saved("Roberta", pooling="cls_token")
    inputs = [[5, 6, 1, 7, 8], [1, 9, 9]]
    with torch.inference_mode():  # a mask, or transformers would take these tokens for padding
        states = [
            tiny.model(input_ids=torch.tensor([each]), attention_mask=torch.ones(1, len(each))).last_hidden_state[0, 0]
            for each in inputs
        ]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=1)
    torch.testing.assert_close(vectors(load(tiny.folder, "fp32").model, inputs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["MPNet", "ModernBert", "NomicBert"])
def test_other_families_run_on_transformers(saved: Saved, family: str, dtype: str) -> None:
    tiny = saved(family, pooling="mean_tokens")
    loaded = load(tiny.folder, dtype)
    assert isinstance(loaded.model.encoder, HFEncoder)  # type: ignore[attr-defined]
    got, expected = vectors(loaded.model, INPUTS), reference(tiny.model, INPUTS, "mean_tokens")
    if dtype == "fp32":
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    else:
        assert float((got * expected).sum(1).min()) > 0.999


def test_cross_encoder_of_another_family_keeps_the_order_of_its_inputs(saved: Saved) -> None:
    tiny = saved("ModernBert", labels=2)
    with torch.inference_mode():
        expected = torch.cat([tiny.model(input_ids=torch.tensor([each])).logits for each in INPUTS])
    torch.testing.assert_close(vectors(load(tiny.folder, "fp32").model, INPUTS), expected, atol=5e-5, rtol=0)


def test_names_of_norms_in_the_first_checkpoints_are_found(tmp_path: Path) -> None:
    tiny = save_encoder(tmp_path, "Bert", pooling="mean_tokens")
    path = tmp_path / "model.safetensors"
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in load_file(path).items()
    }
    save_file(old, path)
    got = vectors(load(tmp_path, "fp32").model, INPUTS)
    torch.testing.assert_close(got, reference(tiny.model, INPUTS, "mean_tokens"), atol=2e-5, rtol=0)


def test_missing_wrong_and_corrupt_tensors_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert", pooling="mean_tokens")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.layer.1.output.dense.weight"
    for change, message in (
        (None, f"no tensor for '{name}'"),
        (tensors[name][:, :-1].contiguous(), f"{name} is \\[64, 159\\]"),
        (tensors[name] * float("nan"), "not a finite number"),
    ):
        save_file({**tensors, name: change} if change is not None else without(tensors, name), path)
        for dtype in ("int8", "fp32"):
            with pytest.raises(ModelError, match=message):
                load(tmp_path, dtype)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in tensors.items() if each != name}


def test_int8_is_the_default_and_runs_in_one_call(saved: Saved) -> None:
    loaded = load(saved("Bert", pooling="mean_tokens").folder, "auto")
    assert loaded.info.dtype == "int8"
    assert isinstance(loaded.model.encoder, FusedEncoder)  # type: ignore[attr-defined]


def test_length_above_that_of_the_model_is_refused(saved: Saved) -> None:
    from syringa.engine.embedding.loading import load_embedding_model
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.modelfiles import locate, read_embedding_spec

    files = locate(str(saved("Bert", pooling="mean_tokens").folder))
    spec = read_embedding_spec(files)
    assert spec is not None
    with pytest.raises(ConfigError, match="--max-model-len 4096"):
        load_embedding_model(LoadOptions(model=files.path, max_model_len=4096, device="cpu"), files, spec)
