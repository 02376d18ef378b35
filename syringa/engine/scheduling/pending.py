"""Requests that cannot be queued yet, because something beside the step loop is still at work for them.

Grammars are compiled and images prepared in threads of their own; here is who waits for what. Called by the step loop
alone, so nothing needs a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syringa.engine.scheduling.fair_queue import most_in_line
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import EngineRequest

if TYPE_CHECKING:
    from syringa.engine.loading.loader import LoadedModel
    from syringa.engine.structured_output.compiler import GrammarCompiler, GrammarState
    from syringa.engine.vision.images import Pictures
    from syringa.engine.vision.preprocessor import Preparation, Studio

MOST_IMAGE_BYTES = 512 << 20  # of files that wait; more is refused
PREPARING = "Too many requests are being prepared: try again shortly."


@dataclass(frozen=True)
class Arrival:
    request: EngineRequest
    origin: int
    submitted: float = 0.0
    grammar: Future[GrammarState] | None = None
    images: Preparation | None = None

    @property
    def futures(self) -> list[Future]:
        found: list[Future] = []
        if self.grammar is not None:
            found.append(self.grammar)
        if self.images is not None:
            found.append(self.images.future)
        return found

    @property
    def failure(self) -> BaseException | None:
        """Why it will never be ready: one failure is enough, the rest need not be waited for."""
        return next((error for f in self.futures if f.done() and (error := f.exception()) is not None), None)

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures) or self.failure is not None

    @property
    def untouched(self) -> bool:
        """Whether everything that is to be done for it waits for its turn."""
        return not any(future.running() or future.done() for future in self.futures)

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in self.request.images)

    @property
    def images_failed(self) -> bool:
        return self.images is not None and self.images.future.done() and self.images.future.exception() is not None

    def result(self) -> tuple[EngineRequest, GrammarState | None, Pictures | None]:
        """The request as it is to be queued. Raises what went wrong."""
        if (failure := self.failure) is not None:
            raise failure
        request, pictures = self.images.future.result() if self.images else (self.request, None)
        return request, self.grammar.result() if self.grammar else None, pictures


class Arrivals:
    def __init__(
        self, loaded: LoadedModel, max_length: int, most: int, tokenizer_json: Callable[[], str] | None
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None  # called on another thread when something may be done
        self.compiler: GrammarCompiler | None = None
        self.studio: Studio | None = None
        if loaded.vision is not None:
            from syringa.engine.vision.preprocessor import Studio

            self.studio = Studio(loaded.vision, max_length)
        self._loaded = loaded
        self._most = most
        self._tokenizer_json = tokenizer_json
        self._waiting: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> set[str]:
        return {arrival.request.tenant for arrival in self._waiting}

    @property
    def any_done(self) -> bool:
        return any(arrival.done for arrival in self._waiting)

    def delays(self, request: EngineRequest) -> bool:
        """Whether a request has to pass here. Raises `InvalidRequest` for images that have no place."""
        if self.studio:
            self.studio.check(request)
        elif request.images:
            raise InvalidRequest("This model reads text only: it cannot take images.", param="messages")
        return bool(request.images) or request.sampling.grammar is not None

    def add(self, request: EngineRequest, origin: int, submitted: float = 0.0) -> Arrival | None:
        """Raises `EngineOverloaded` or `InvalidRequest`. What comes back has to give up its place to this one."""
        displaced = self._displaced_by(request.tenant)
        own = request.sampling.grammar
        grammar = self._compiler().compile(own, request.tenant) if own is not None else None
        images = self.studio.prepare(request) if self.studio and request.images else None
        arrival = Arrival(request, origin, submitted, grammar, images)
        self._waiting.append(arrival)
        for future in arrival.futures:
            future.add_done_callback(lambda _: self.on_ready())
        return displaced

    def overdue(self, before: float) -> list[Arrival]:
        """Those that came before that time and that nothing was done for yet."""
        return [arrival for arrival in self._waiting if arrival.submitted <= before and arrival.untouched]

    def take(self) -> list[Arrival]:
        """Those that are done, in the order they came."""
        if not self._waiting:
            return []
        done = {id(arrival) for arrival in self._waiting if arrival.done}
        taken = [arrival for arrival in self._waiting if id(arrival) in done]
        self._waiting = [arrival for arrival in self._waiting if id(arrival) not in done]
        return taken

    def forget(self, origin: int, request_id: str | None = None) -> None:
        """A client's request is no longer wanted, or all of them: spares what was not begun."""
        waiting = []
        for arrival in self._waiting:
            if arrival.origin == origin and request_id in (None, arrival.request.id):
                for work in (arrival.grammar, arrival.images):
                    if work is not None:
                        work.cancel()
            else:
                waiting.append(arrival)
        self._waiting = waiting

    def close(self) -> None:
        if self.compiler:
            self.compiler.close()
        if self.studio:
            self.studio.close()

    def _displaced_by(self, tenant: str) -> Arrival | None:
        """The newest of another tenant where too much waits, in number or in bytes. None: there is room."""
        if len(self._waiting) >= self._most:
            most, weights = self._most, [1] * len(self._waiting)
        else:
            most, weights = MOST_IMAGE_BYTES, [arrival.image_bytes for arrival in self._waiting]
            if sum(weights) <= most:
                return None
        held: Counter[str] = Counter()
        for arrival, weight in zip(self._waiting, weights, strict=True):
            held[arrival.request.tenant] += weight
        giver = most_in_line(held, tenant, most)
        if giver is None:
            raise EngineOverloaded(PREPARING)
        pairs = zip(reversed(self._waiting), reversed(weights), strict=True)
        return next(arrival for arrival, weight in pairs if weight and arrival.request.tenant == giver)

    def _compiler(self) -> GrammarCompiler:
        if self.compiler is None:
            if self._tokenizer_json is None:
                raise InvalidRequest(
                    "This engine was started without a tokenizer, so it has no grammars.", param="grammar"
                )
            from syringa.engine.structured_output.compiler import GrammarCompiler

            ends = sorted(self._loaded.description.end_tokens)
            self.compiler = GrammarCompiler(self._tokenizer_json(), self._loaded.info.vocab_size, ends)
        return self.compiler
