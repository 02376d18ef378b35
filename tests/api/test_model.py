from __future__ import annotations

import pytest

from syringa.api.model import Models, load_model
from syringa.config import Config
from syringa.errors import ModelError, NotFound
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


def test_a_missing_model() -> None:
    with pytest.raises(ModelError):
        load_model(Config(model="/no/such/folder"))


def test_names() -> None:
    first, second = fake_model(id="a", aliases=("x",)), fake_model(id="b", aliases=("x", "y"))
    models = Models([first, second])
    assert [models.find(name) for name in (None, "default", "a", "x")] == [first] * 4
    assert [models.find(name) for name in ("b", "y")] == [second] * 2
    with pytest.raises(NotFound, match="Available: a, b"):
        models.find("c")


def test_a_document_starts_somewhere() -> None:
    assert fake_model(bos_token=None).start_token == END
    assert fake_model(bos_token=None, end_tokens=frozenset()).start_token is None


async def test_a_long_text_is_encoded_in_a_thread() -> None:
    text = "x" * 10_000
    assert await fake_model().encode_all([text]) == [[*text.encode()]]
