"""What tokens cost."""

from __future__ import annotations

from typing import Annotated

import msgspec

_MILLION = 1_000_000

Price = Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # not infinite: sums have to make sense


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Of a million tokens, in whatever currency the admin counts."""

    input: Price = 0.0
    cached_input: Price | None = None  # None: the same as other input
    output: Price = 0.0


def cost(prices: Prices, input: int, cached: int, output: int) -> float:
    """`cached` tokens are some of the `input` tokens."""
    cached_price = prices.input if prices.cached_input is None else prices.cached_input
    return ((input - cached) * prices.input + cached * cached_price + output * prices.output) / _MILLION
