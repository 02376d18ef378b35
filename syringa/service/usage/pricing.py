"""What tokens cost."""

from __future__ import annotations

from syringa.config import Prices

__all__ = ["Prices", "cost"]

_MILLION = 1_000_000


def cost(prices: Prices, input: int, cached: int, output: int) -> float:
    """`cached` tokens are some of the `input` tokens."""
    cached_price = prices.input if prices.cached_input is None else prices.cached_input
    return ((input - cached) * prices.input + cached * cached_price + output * prices.output) / _MILLION
