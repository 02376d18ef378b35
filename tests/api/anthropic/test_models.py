from __future__ import annotations

import pytest

from syringa.api.anthropic.models import list_anthropic_models
from syringa.api.models.served_model import ModelCard, find_by_name
from syringa.errors import NotFound

CARDS = [ModelCard(id=id, created=0) for id in "abcd"]


@pytest.mark.parametrize(
    ("after", "before", "limit", "ids", "more"),
    [
        (None, None, 20, "abcd", False),
        (None, None, 2, "ab", True),
        ("b", None, 20, "cd", False),
        ("a", None, 2, "bc", True),
        (None, "d", 2, "bc", True),
        (None, "b", 2, "a", False),
        ("d", None, 2, "", False),
    ],
)
def test_model_list_is_paged(after: str | None, before: str | None, limit: int, ids: str, more: bool) -> None:
    page = list_anthropic_models(CARDS, after=after, before=before, limit=limit)
    assert ("".join(model.id for model in page.data), page.has_more) == (ids, more)
    assert (page.first_id, page.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


def test_model_list_refuses_an_unknown_cursor() -> None:
    with pytest.raises(NotFound, match="after_id: there is no model 'x'"):
        list_anthropic_models(CARDS, after="x", before=None, limit=1)


def test_longest_pattern_finds_a_name_unless_the_name_itself_is_known() -> None:
    names = {"claude-*": 1, "claude-haiku-*": 2, "claude-haiku-x": 3, "*": 4}
    assert find_by_name(names, "claude-opus") == 1
    assert find_by_name(names, "claude-haiku-4") == 2
    assert find_by_name(names, "claude-haiku-x") == 3
    assert find_by_name(names, "other") == 4
    with pytest.raises(KeyError):
        find_by_name({"claude-*": 1}, "gpt")
