from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import DenseModule, EmbeddingSpec, model_kind, read_embedding_spec
from syringa.modelfiles.locate import ModelFiles

BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8, "max_position_embeddings": 64}
MEAN = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
TYPES = "sentence_transformers.models."


def modules(*names: str) -> list[dict[str, Any]]:
    """Return a modules.json of an encoder and these modules, each in a folder of its own."""
    paths = [f"{index}_{name}" for index, name in enumerate(names, 1)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": TYPES + name}
        for index, (name, path) in enumerate(zip(("Transformer", *names), ("", *paths), strict=True))
    ]


def read(path: Path, files: dict[str, Any]) -> EmbeddingSpec | None:
    """Write these files, JSON unless they are text, to a folder and read it."""
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return read_embedding_spec(ModelFiles("m", str(path), "folder"))


def test_read_embedding_spec_follows_modules_of_sentence_transformers(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        {
            "config.json": BERT,
            "modules.json": modules("Pooling", "Dense", "Normalize"),
            "1_Pooling/config.json": {**MEAN, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
            "2_Dense/config.json": {
                "in_features": 8,
                "out_features": 4,
                "bias": False,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
            "2_Dense/model.safetensors": "weights",
            "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": True},
            "tokenizer_config.json": {"model_max_length": 16},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "document": ""},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
            },
        },
    )
    assert spec == EmbeddingSpec(
        kind="embed",
        architecture="BertModel",
        max_length=32,
        dimensions=4,
        pooling="cls",
        dense=(DenseModule(path="2_Dense", in_features=8, out_features=4, bias=False, activation="tanh"),),
        normalize=True,
        prompts={"query": "query: ", "document": ""},
        default_prompt="query",
        lower_case=True,
        similarity="dot",
    )


def test_read_embedding_spec_averages_tokens_of_bare_encoder(tmp_path: Path) -> None:
    spec = read(tmp_path, {"config.json": BERT, "tokenizer_config.json": {"model_max_length": 48}})
    assert spec == EmbeddingSpec(kind="embed", architecture="BertModel", max_length=48, dimensions=8)


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 1e30, 512),
        ({"model_type": "bert", "max_position_embeddings": 512}, 256, 256),
        ({"model_type": "bert", "max_position_embeddings": None}, 1e30, 512),
    ],
)
def test_read_embedding_spec_takes_smallest_length(
    tmp_path: Path, config: dict[str, Any], tokenizer: float, expected: int
) -> None:
    spec = read(tmp_path, {"config.json": BERT | config, "tokenizer_config.json": {"model_max_length": tokenizer}})
    assert spec is not None
    assert spec.max_length == expected


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({"id2label": {"0": "LABEL_0"}}, 1, "sigmoid"),
        ({"id2label": {"0": "no", "1": "yes"}}, 2, "identity"),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            1,
            "identity",
        ),
        (
            {"id2label": {"0": "x"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            1,
            "identity",
        ),
    ],
)
def test_read_embedding_spec_of_cross_encoder(
    tmp_path: Path, changes: dict[str, Any], labels: int, activation: str
) -> None:
    spec = read(tmp_path, {"config.json": {**BERT, "architectures": ["BertForSequenceClassification"], **changes}})
    assert spec is not None
    assert (spec.kind, spec.dimensions, spec.activation) == ("score", labels, activation)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, (), 1)),
        ({"is_matryoshka": True}, (True, (), 1)),
        ({"matryoshka_dimensions": [4, 2, 16]}, (True, (2, 4), 1)),
        ({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}, (True, (), 32)),
    ],
)
def test_read_embedding_spec_knows_matryoshka_models(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[bool, tuple[int, ...], int]
) -> None:
    pooling = {"word_embedding_dimension": 8, "pooling_mode": "lasttoken"}
    files = {"modules.json": modules("Pooling"), "1_Pooling/config.json": pooling}
    spec = read(tmp_path, {"config.json": BERT | changes, **files})
    assert spec is not None
    assert spec.pooling == "lasttoken"
    assert (spec.matryoshka, spec.matryoshka_dimensions, spec.min_dimensions) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": modules("Pooling", "LSTM")}, "LSTM is not supported"),
        ({"modules.json": modules("Pooling")[1:]}, "first module"),
        ({"modules.json": "[]"}, "lists no modules"),
        ({"modules.json": '[{"path": ""}]'}, "cannot be read|can be read"),
        ({"modules.json": "{"}, "cannot be read"),
        ({"modules.json": [*modules("Pooling"), {"type": "Dense", "path": "../x"}]}, "not a folder of the model"),
        ({"modules.json": modules("Pooling", "Dense")}, "no model.safetensors"),
        ({"1_Pooling/config.json": {**MEAN, "pooling_mode_max_tokens": True}}, "mean and max is not supported"),
        ({"1_Pooling/config.json": {"pooling_mode": "median"}}, "the pooling median is not supported; one of"),
        ({"config.json": {**BERT, "hidden_size": "8"}}, "hidden_size is '8'"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, "no prompt 'query'"),
        ({"config_sentence_transformers.json": {"prompts": "query"}}, "can be read"),
        ({"config_sentence_transformers.json": {"similarity_fn_name": "jaccard"}}, "'jaccard' is not supported"),
    ],
)
def test_read_embedding_spec_refuses_folder(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    usual = {"config.json": BERT, "modules.json": modules("Pooling"), "1_Pooling/config.json": MEAN}
    with pytest.raises(ModelError, match=message):
        read(tmp_path, usual | files)


@pytest.mark.parametrize(
    "flags", [{"pooling_mode_mean_sqrt_len_tokens": True}, {"pooling_mode": "mean_sqrt_len_tokens"}]
)
def test_read_embedding_spec_reads_pooling_by_flag_and_by_name(tmp_path: Path, flags: dict[str, Any]) -> None:
    files = {"modules.json": modules("Pooling"), "1_Pooling/config.json": {"word_embedding_dimension": 8, **flags}}
    spec = read(tmp_path, {"config.json": BERT, **files})
    assert spec is not None
    assert spec.pooling == "mean_sqrt_len_tokens"


def test_model_kind_of_generating_models_is_generate(tmp_path: Path) -> None:
    assert read(tmp_path, {"config.json": {"architectures": ["LlamaForCausalLM"]}}) is None
    assert model_kind(ModelFiles("m", str(tmp_path), "folder")) == "generate"
    assert model_kind(ModelFiles("m", "model.gguf", "gguf")) == "generate"
