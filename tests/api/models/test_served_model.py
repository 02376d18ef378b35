"""Tests of served models and fixed model lists."""

from __future__ import annotations

import pytest

from syringa.api.models.served_model import FixedModels
from syringa.errors import Forbidden, NotFound
from tests.fake_engine import END, fake_model


async def test_fixed_models_find_by_name() -> None:
    first, second = fake_model(id="a", aliases=("x",)), fake_model(id="b", aliases=("x", "y"))
    models = FixedModels([first, second])
    assert [await models.find(name) for name in (None, "", "default", "a", "x")] == [first] * 5
    assert [await models.find(name) for name in ("b", "y")] == [second] * 2
    with pytest.raises(NotFound, match="Available: a, b"):
        await models.find("c")


async def test_fixed_models_for_key() -> None:
    first, second = fake_model(id="a"), fake_model(id="b", aliases=("y",))
    models = FixedModels([first, second]).for_key(frozenset({"b"}))
    assert await models.all() == [second.card()]
    assert await models.show("y") == second.card()
    assert await models.find("y") == second
    for name in ("a", None):
        with pytest.raises(Forbidden, match="may not use the model 'a'"):
            await models.find(name)
    with pytest.raises(NotFound, match="Available: b"):
        await models.find("c")


def test_start_token_falls_back_to_end_token() -> None:
    assert fake_model(bos_token=None).start_token == END
    assert fake_model(bos_token=None, end_tokens=frozenset()).start_token is None


async def test_encode_all_encodes_long_text() -> None:
    text = "x" * 10_000
    assert await fake_model().encode_all([text]) == [[*text.encode()]]
