from __future__ import annotations

import json
from pathlib import Path

import pytest

from syringa.api.model import FixedModels, image_policy, load_model
from syringa.config import Config
from syringa.dialect import Dialect
from syringa.errors import ConfigError, Forbidden, ModelError, NotFound
from syringa.prompt.images import ImagePolicy
from tests.fake_engine import END, fake_model


@pytest.mark.model
async def test_the_default_model() -> None:
    model = load_model(Config(served_model_name=("mine", "other"), max_model_len=100))
    assert (model.id, model.max_model_len) == ("mine", 100)
    assert {"other", "default", "SmolLM2-135M-Instruct"} <= set(model.aliases)
    (tokens,) = await model.encode_all(["Hello world"])
    assert model.spell(tokens) == "Hello world"
    assert [model.token_text(token) for token in tokens] == ["Hello", " world"]
    assert model.template is not None
    assert model.end_tokens
    assert model.dialect == Dialect()  # its template knows neither tools nor thoughts
    assert not model.sees_images


def test_a_missing_model() -> None:
    with pytest.raises(ModelError):
        load_model(Config(model="/no/such/folder"))


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_TEMPLATE = "{{ tools }}<tool_call>"


def folder(path: Path, **config: object) -> str:
    """A model without weights, which the API does not need."""
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    tokens = [{"id": 1, "content": "<think>", "special": False, "normalized": False}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [token | flags for token in tokens],
        "model": {"type": "BPE", "vocab": {"a": 0, "<think>": 1}, "merges": []},
    }
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    (path / "config.json").write_text(json.dumps(known | config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(path)


def test_the_dialect_is_read_off_templates_and_tokens(tmp_path: Path) -> None:
    model = load_model(Config(model=folder(tmp_path)))
    assert model.dialect == Dialect(calls="hermes", thought="think", knows_tools=True)
    assert not model.sees_images
    told = load_model(Config(model=str(tmp_path), tool_format="glm", reasoning_format="none"))
    assert told.dialect == Dialect(calls="glm", knows_tools=True)


def test_a_model_that_sees(tmp_path: Path) -> None:
    assert load_model(Config(model=folder(tmp_path, vision_config={"depth": 1}))).sees_images


def test_a_template_of_the_operator_s_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("own: {{ messages[0].content }} ü", encoding="utf-8")
    model = load_model(Config(model=folder(tmp_path), chat_template=str(path)))
    assert model.template is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert model.template.render(messages) == model.template.render(messages, tools=[]) == "own: Hi ü"
    assert model.dialect == Dialect(thought="think")


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{% for x in y %}", "chat template is broken"), (b"\xff\xfe", "cannot be read"), (None, "there is no file")],
)
def test_a_template_file_that_is_no_good(tmp_path: Path, data: bytes | None, said: str) -> None:
    path = tmp_path / "own.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=said) as caught:
        load_model(Config(model=folder(tmp_path), chat_template=str(path)))
    assert "own.jinja" in caught.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(Config(model=str(tmp_path), chat_template=str(tmp_path)))


def test_the_settings_of_images() -> None:
    assert image_policy(Config()) == ImagePolicy()
    config = Config(
        image_hosts_private=True, image_max_bytes=1, image_timeout=2.0, image_max_pixels=3, images_per_request=4
    )
    assert image_policy(config) == ImagePolicy(private=True, max_bytes=1, timeout=2.0, max_pixels=3, max_images=4)


async def test_names() -> None:
    first, second = fake_model(id="a", aliases=("x",)), fake_model(id="b", aliases=("x", "y"))
    models = FixedModels([first, second])
    assert [await models.find(name) for name in (None, "default", "a", "x")] == [first] * 4
    assert [await models.find(name) for name in ("b", "y")] == [second] * 2
    with pytest.raises(NotFound, match="Available: a, b"):
        await models.find("c")


async def test_models_that_a_key_may_use() -> None:
    first, second = fake_model(id="a"), fake_model(id="b", aliases=("y",))
    models = FixedModels([first, second]).for_key(frozenset({"b"}))
    assert await models.all() == [second]
    assert await models.find("y") == second
    for name in ("a", None):
        with pytest.raises(Forbidden, match="may not use the model 'a'"):
            await models.find(name)
    with pytest.raises(NotFound, match="Available: b"):
        await models.find("c")


def test_a_document_starts_somewhere() -> None:
    assert fake_model(bos_token=None).start_token == END
    assert fake_model(bos_token=None, end_tokens=frozenset()).start_token is None


async def test_a_long_text_is_encoded_in_a_thread() -> None:
    text = "x" * 10_000
    assert await fake_model().encode_all([text]) == [[*text.encode()]]
