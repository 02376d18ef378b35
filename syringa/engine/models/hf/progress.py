"""How far `transformers` is in reading the weights of a model, and this engine in converting its layers after that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from syringa.engine.loading.loaded_model import Progress

READING = "Loading weights"  # what transformers calls the bar of its loop over the parameters


class WeightProgress:
    """Counts parameters that are read and layers that are converted, and reports both as one number."""

    def __init__(self, report: Progress | None, layers: int = 0) -> None:
        """`layers`: how many are converted once all parameters have been read."""
        self._report, self._layers = report, layers
        self._done = self._total = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count the parameters that `from_pretrained` reads in this block.

        It shows them with a progress bar, and has a public hook for what stands in for that.
        """
        from transformers.utils.logging import set_tqdm_hook

        def make_bar(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if args and options.get("desc") == READING and hasattr(args[0], "__len__"):
                self._total = len(args[0]) + self._layers
                args = (self._count(args[0]), *args[1:])
            return bar(*args, **options)

        before = set_tqdm_hook(make_bar)
        try:
            yield
        finally:
            set_tqdm_hook(before)

    def advance(self) -> None:
        """Count one more. What was not expected changes nothing."""
        self._done = min(self._done + 1, self._total)
        if self._report is not None and self._total:
            self._report(self._done, self._total)

    def finish(self) -> None:
        """Report that all is done."""
        self._done = self._total
        self.advance()

    def _count(self, parameters: Any) -> Iterator[Any]:
        for each in parameters:
            yield each
            self.advance()


def count_linears(model: nn.Module) -> int:
    return sum(type(each) is nn.Linear for each in model.modules())
