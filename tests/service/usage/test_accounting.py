from __future__ import annotations

import msgspec
import pytest

from syringa.service.usage.accounting import cost


def test_each_kind_of_token_has_its_price() -> None:
    prices = Prices(input=2.0, cached_input=0.5, output=8.0)
    assert cost(prices, 1_000_000, 0, 0) == 2.0
    assert cost(prices, 1_000_000, 400_000, 0) == pytest.approx(0.6 * 2 + 0.4 * 0.5)
    assert cost(prices, 0, 0, 250_000) == 2.0
    assert cost(prices, 100, 100, 1) == pytest.approx((100 * 0.5 + 8) / 1e6)


def test_cached_input_costs_as_much_as_other_unless_it_has_a_price() -> None:
    assert cost(Prices(input=2.0), 1_000_000, 700_000, 0) == 2.0
    assert cost(Prices(input=2.0, cached_input=0.0), 1_000_000, 700_000, 0) == pytest.approx(0.6)


def test_nothing_is_for_free_unless_it_is_said() -> None:
    assert cost(Prices(), 10**9, 10**8, 10**9) == 0.0


@pytest.mark.parametrize("text", ['{"input": -1}', '{"output": 1e999}', '{"cached_input": -0.1}', '{"input": "2"}'])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Prices)
