from __future__ import annotations

import msgspec
import pytest

from syringa.config import Prices
from syringa.service.usage.accounting import cost


def test_cost_of_each_kind_of_token() -> None:
    prices = Prices(input=2.0, cached_input=0.5, output=8.0)
    assert cost(prices, 1_000_000, 0, 0) == 2.0
    assert cost(prices, 1_000_000, 400_000, 0) == pytest.approx(0.6 * 2 + 0.4 * 0.5)
    assert cost(prices, 0, 0, 250_000) == 2.0
    assert cost(prices, 100, 100, 1) == pytest.approx((100 * 0.5 + 8) / 1e6)


def test_cached_input_defaults_to_price_of_input() -> None:
    assert cost(Prices(input=2.0), 1_000_000, 700_000, 0) == 2.0
    assert cost(Prices(input=2.0, cached_input=0.0), 1_000_000, 700_000, 0) == pytest.approx(0.6)


def test_cost_is_zero_without_prices() -> None:
    assert cost(Prices(), 10**9, 10**8, 10**9) == 0.0


@pytest.mark.parametrize("text", ['{"input": -1}', '{"output": 1e999}', '{"cached_input": -0.1}', '{"input": "2"}'])
def test_invalid_prices_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Prices)
