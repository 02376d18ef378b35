"""Tests of loading served models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syringa.api.models import loading
from syringa.api.models.loading import describe_model, image_policy, load_model
from syringa.api.models.specs import pulled_fields, serving_specs
from syringa.config import Config, ModelSpec, Prices, read_model
from syringa.config.specs import Replicas
from syringa.errors import ConfigError, ModelError
from syringa.output_formats import ModelFormats
from syringa.prompt.images.loader import ImagePolicy
from tests.api.model_files import write_model_folder
from tests.embedding_models import CLS, MAX_LENGTH, SEP, tokens_of, write_embedding_folder


@pytest.mark.model
async def test_load_model_loads_default_model() -> None:
    config = Config(served_model_name=("mine", "other"), max_model_len=100, max_choices=7, unsupported_tools="refuse")
    model = load_model(config)
    assert (model.id, model.max_model_len, model.max_choices) == ("mine", 100, 7)
    assert model.unsupported_tools == "refuse"
    assert {"other", "default", "SmolLM2-135M-Instruct"} <= set(model.aliases)
    (tokens,) = await model.encode_all(["Hello world"])
    assert model.decode_tokens(tokens) == "Hello world"
    assert [model.token_text(token) for token in tokens] == ["Hello", " world"]
    assert model.template is not None
    assert model.end_tokens
    assert model.formats == ModelFormats()  # its template has neither tools nor reasoning
    assert not model.supports_images


@pytest.mark.parametrize("write_folder", [write_model_folder, write_embedding_folder])
def test_load_model_returns_the_memory_that_building_a_tokenizer_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_folder: Callable[[Path], object]
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(loading, "trim_heap", lambda: calls.append(1))
    write_folder(tmp_path)
    load_model(Config(model=str(tmp_path)))
    assert calls == [1]


def test_load_model_rejects_missing_folder() -> None:
    with pytest.raises(ModelError):
        load_model(Config(model="/no/such/folder"))


def test_load_model_detects_output_formats(tmp_path: Path) -> None:
    model = load_model(Config(model=write_model_folder(tmp_path)))
    assert model.formats == ModelFormats(tool_calls="hermes", reasoning="think", supports_tools=True)
    assert not model.supports_images
    configured = load_model(Config(model=str(tmp_path), tool_format="glm", reasoning_format="none"))
    assert configured.formats == ModelFormats(tool_calls="glm", supports_tools=True)


def test_load_model_passes_settings_of_chat(tmp_path: Path) -> None:
    path = write_model_folder(tmp_path)
    model = load_model(Config(model=path, request_chat_templates="allow", reasoning_fields="reasoning_content"))
    assert (model.request_chat_templates, model.reasoning_fields) == ("allow", "reasoning_content")


def test_fingerprint_identifies_files_settings_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model_folder(tmp_path)

    def fingerprint(**settings: Any) -> str:
        return load_model(Config(model=path, **settings)).system_fingerprint

    first = fingerprint()
    assert re.fullmatch("fp_[0-9a-f]{12}", first)
    assert fingerprint(served_model_name=("other",), max_model_len=10) == first
    seen = {first, fingerprint(dtype="bf16")}
    with monkeypatch.context() as patched:
        patched.setattr("syringa.api.models.loading.installed_version", lambda: "99.0")
        seen.add(fingerprint())
    (tmp_path / "model.safetensors").write_bytes(b"\x03\0\0\0\0\0\0\0{} ")
    seen.add(fingerprint())
    assert len(seen) == 4


def test_load_model_detects_image_support(tmp_path: Path) -> None:
    assert load_model(Config(model=write_model_folder(tmp_path, vision_config={"depth": 1}))).supports_images
    text_only = write_model_folder(tmp_path, vision_config={"depth": 1}, model_type="qwen3_5")
    assert not load_model(Config(model=text_only)).supports_images


def test_load_model_uses_configured_template(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("own: {{ messages[0].content }} ü", encoding="utf-8")
    model = load_model(Config(model=write_model_folder(tmp_path), chat_template=str(path)))
    assert model.template is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert model.template.render(messages) == model.template.render(messages, tools=[]) == "own: Hi ü"
    assert model.formats == ModelFormats(reasoning="think")


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"{% for x in y %}", "chat template is invalid"), (b"\xff\xfe", "cannot be read"), (None, "file not found")],
)
def test_load_model_rejects_bad_template_file(tmp_path: Path, data: bytes | None, expected: str) -> None:
    path = tmp_path / "own.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_model(Config(model=write_model_folder(tmp_path), chat_template=str(path)))
    assert "own.jinja" in caught.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(Config(model=str(tmp_path), chat_template=str(tmp_path)))


def test_image_policy_has_settings() -> None:
    assert image_policy(Config()) == ImagePolicy()
    config = Config(
        image_hosts_private=True, image_max_bytes=1, image_timeout=2.0, image_max_pixels=3, images_per_request=4
    )
    assert image_policy(config) == ImagePolicy(allow_private=True, max_bytes=1, timeout=2.0, max_pixels=3, max_images=4)


def test_load_model_keeps_names_of_spec(tmp_path: Path) -> None:
    prices = Prices(input=1)
    spec = ModelSpec(id="a", aliases=("b",), path=write_model_folder(tmp_path), prices=prices, defaults={"top_k": 3})
    model = load_model(Config(), spec)
    assert (model.id, model.aliases, model.prices, model.defaults) == ("a", ("b",), prices, {"top_k": 3})
    alone = load_model(Config(models=(spec,)))
    assert (alone.id, alone.aliases) == ("a", ("b",))


async def test_load_model_reads_embedding_model(tmp_path: Path) -> None:
    path = write_embedding_folder(tmp_path / "tiny")
    spec = ModelSpec(id="e", path=path, prices=Prices(input=2))
    model = load_model(Config(embedding_max_tokens=99), spec)
    assert model.encoder is not None
    assert (model.kind, model.max_model_len, model.encoder.max_request_tokens) == ("embed", MAX_LENGTH, 99)
    assert model.encoder.tokenizer.encode("ab") == [CLS, *tokens_of("ab"), SEP]
    card = model.card("cold")
    assert describe_model(spec, model.created) == card
    assert (card.kind, card.dimensions, card.prices) == ("embed", 4, Prices(input=2))
    assert load_model(Config(), ModelSpec(id="e", path=path, max_model_len=9)).max_model_len == 9


def test_load_model_reads_cross_encoder(tmp_path: Path) -> None:
    path = write_embedding_folder(tmp_path, architectures=["BertForSequenceClassification"], id2label={"0": "x"})
    card = load_model(Config(), ModelSpec(id="e", path=path)).card()
    assert (card.kind, card.dimensions, card.capabilities) == ("score", None, ("rerank", "score"))


def test_pulled_model_does_not_have_the_settings_of_the_first_one(tmp_path: Path) -> None:
    chat, embedding = write_model_folder(tmp_path), write_embedding_folder(tmp_path / "tiny")
    assert pulled_fields(chat, Config()) == {"path": chat}
    short = Config(max_model_len=32, dtype="bf16", threads=2)
    assert pulled_fields(chat, short) == {"path": chat}  # which follow the settings
    config = Config(
        max_model_len=1000, chat_template="x.jinja", tool_format="hermes", dtype="bf16", replicas=Replicas(max=3)
    )
    own = {"chat_template": "", "tool_format": "auto"}
    assert pulled_fields(chat, config) == {"path": chat, "max_model_len": 0} | own
    fields = pulled_fields(embedding, config)
    assert fields == {"path": embedding, "max_model_len": 0, "dtype": "auto", "replicas": {"min": 1, "max": 1}} | own
    spec = read_model(fields | {"id": "e"}, config)
    assert load_model(config, spec).max_model_len == MAX_LENGTH


def test_serving_specs_name_embedding_model_by_its_folder(tmp_path: Path) -> None:
    chat, path = write_model_folder(tmp_path), write_embedding_folder(tmp_path / "tiny")
    first, second = serving_specs(Config(model=chat, embedding_model=path))
    assert (second.id, second.aliases) == ("tiny", (path,))
    one = ModelSpec(id="tiny", path=chat)
    with pytest.raises(ConfigError, match="the model is called 'tiny', as another one is"):
        serving_specs(Config(models=(one,), embedding_model=path))
    with pytest.raises(ModelError, match="no such file"):
        serving_specs(Config(model=chat, embedding_model="/no/such/folder"))
    assert first.id == tmp_path.name


def test_serving_specs_have_ids(tmp_path: Path) -> None:
    path = write_model_folder(tmp_path)
    (spec,) = serving_specs(Config(model=path))
    assert (spec.id, spec.aliases, spec.preload) == (tmp_path.name, (path,), True)
    (spec,) = serving_specs(Config(model=path, served_model_name=("x", "y")))
    assert (spec.id, spec.aliases) == ("x", ("y", tmp_path.name, path))
    one = ModelSpec(id="one", path=path)
    assert [each.id for each in serving_specs(Config(models=(one, ModelSpec(id="two", path="/nowhere"))))] == [
        "one",
        "two",
    ]
    with pytest.raises(ModelError):
        serving_specs(Config(model="/no/such/folder"))


def test_describe_model_needs_no_tokenizer(tmp_path: Path) -> None:
    spec = ModelSpec(
        id="a", aliases=("b",), path=write_model_folder(tmp_path, vision_config={"depth": 1}), max_model_len=9
    )
    card = describe_model(spec, created=5)
    assert (card.id, card.aliases, card.created, card.max_model_len, card.status) == ("a", ("b",), 5, 9, "cold")
    assert card.capabilities == ("completion", "chat", "vision")
    with pytest.raises(ModelError):
        describe_model(ModelSpec(id="a", path="/nowhere"), created=5)
