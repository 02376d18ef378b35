"""Requests that are not queued yet, because their grammar is being compiled or their images are being preprocessed.

That work runs in threads of its own. These classes are used by the step loop alone, so they need no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syringa.engine.scheduling.fair_queue import tenant_to_displace
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import EngineRequest

if TYPE_CHECKING:
    from syringa.engine.loading.loaded_model import LoadedModel
    from syringa.engine.structured_output.compiler import GrammarCompiler, GrammarState
    from syringa.engine.vision.preprocessor import ImagePreprocessor, PreprocessingTask
    from syringa.engine.vision.prompt_images import PromptImages

MAX_IMAGE_BYTES = 512 << 20  # of the image files of all pending requests, and of all background requests
PREPARING = "Too many requests are being prepared: try again shortly."


@dataclass(frozen=True)
class PendingRequest:
    """A request with the work that has to finish before it can be queued."""

    request: EngineRequest
    client_id: int
    submitted: float = 0.0
    grammars: tuple[Future[GrammarState], ...] = ()  # one for each sequence that is to be queued
    images: PreprocessingTask | None = None

    @property
    def futures(self) -> list[Future]:
        return [*self.grammars, *([self.images.future] if self.images is not None else [])]

    @property
    def failure(self) -> BaseException | None:
        """The first error. One is enough: the other work is not waited for."""
        return next((error for f in self.futures if f.done() and (error := f.exception()) is not None), None)

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures) or self.failure is not None

    @property
    def not_started(self) -> bool:
        """Whether none of its work has started."""
        return not any(future.running() or future.done() for future in self.futures)

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in self.request.images)

    @property
    def images_failed(self) -> bool:
        return self.images is not None and self.images.future.done() and self.images.future.exception() is not None

    def cancel(self) -> None:
        """Cancel the work that has not started."""
        for grammar in self.grammars:
            grammar.cancel()
        if self.images is not None:
            self.images.cancel()

    def result(self) -> tuple[EngineRequest, list[GrammarState], PromptImages | None]:
        """Return the request as it is to be queued, with image placeholders expanded. Raises `failure`."""
        if (failure := self.failure) is not None:
            raise failure
        request, prompt_images = self.images.future.result() if self.images else (self.request, None)
        return request, [grammar.result() for grammar in self.grammars], prompt_images


class PendingRequests:
    """The pending requests of an engine, at most `capacity` of them and any number of background requests.

    Background requests take no capacity from others, and are prepared after them.
    """

    def __init__(
        self, loaded: LoadedModel, max_length: int, capacity: int, tokenizer_json: Callable[[], str] | None
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None  # called on another thread when a request may be done
        self.compiler: GrammarCompiler | None = None
        self.image_preprocessor: ImagePreprocessor | None = None
        if loaded.vision is not None:
            from syringa.engine.vision.preprocessor import ImagePreprocessor

            self.image_preprocessor = ImagePreprocessor(loaded.vision, max_length)
        self._loaded = loaded
        self._capacity = capacity
        self._tokenizer_json = tokenizer_json
        self._pending: list[PendingRequest] = []

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def tenants(self) -> set[str]:
        return {pending.request.tenant for pending in self._pending}

    @property
    def fingerprints(self) -> list[bytes]:
        """The fingerprints of the requests that are being prepared now."""
        return [pending.request.fingerprint for pending in self._pending if not pending.not_started]

    @property
    def any_done(self) -> bool:
        return any(pending.done for pending in self._pending)

    def needs_preparation(self, request: EngineRequest) -> bool:
        """Return whether a request needs preparation. Raises `InvalidRequest` for images that the model cannot take."""
        if self.image_preprocessor:
            self.image_preprocessor.check(request)
        elif request.images:
            raise InvalidRequest("This model reads text only: it cannot take images.", param="messages")
        return bool(request.images) or request.sampling.grammar is not None

    def add(self, request: EngineRequest, client_id: int, submitted: float = 0.0) -> PendingRequest | None:
        """Start preparing a request. Raises `EngineOverloaded` or `InvalidRequest`.

        Returns the pending request that this one displaces, if there is one; the caller has to cancel it.
        """
        displaced = None
        if request.background:
            self._check_background(request)
        elif not request.resumed:
            displaced = self._displaced_by(request.tenant)
        grammars = self._compile(request) if request.sampling.grammar is not None else ()
        images = self.image_preprocessor.prepare(request) if self.image_preprocessor and request.images else None
        pending = PendingRequest(request, client_id, submitted, grammars, images)
        self._pending.append(pending)
        for future in pending.futures:
            future.add_done_callback(lambda _: self.on_ready())
        return displaced

    def overdue(self, before: float) -> list[PendingRequest]:
        """Return the new requests that were submitted before that time and whose work has not started."""
        late = (pending for pending in self._pending if pending.submitted <= before and pending.not_started)
        return [pending for pending in late if not pending.request.resumed and not pending.request.background]

    def pop_done(self) -> list[PendingRequest]:
        """Remove and return the requests that are done, in order of submission."""
        if not self._pending:
            return []
        done = {id(pending) for pending in self._pending if pending.done}
        popped = [pending for pending in self._pending if id(pending) in done]
        self._pending = [pending for pending in self._pending if id(pending) not in done]
        return popped

    def cancel(self, client_id: int, request_id: str | None = None) -> None:
        """Drop one request of a client, or all of them, and cancel the work that has not started."""
        kept = []
        for pending in self._pending:
            if pending.client_id == client_id and request_id in (None, pending.request.id):
                pending.cancel()
            else:
                kept.append(pending)
        self._pending = kept

    def close(self) -> None:
        if self.compiler:
            self.compiler.close()
        if self.image_preprocessor:
            self.image_preprocessor.close()

    def _check_background(self, request: EngineRequest) -> None:
        """Raise `EngineOverloaded` for images if background requests have too many already."""
        if request.images and not request.resumed:
            held = sum(pending.image_bytes for pending in self._pending if pending.request.background)
            if held > MAX_IMAGE_BYTES:
                raise EngineOverloaded(PREPARING)

    def _displaced_by(self, tenant: str) -> PendingRequest | None:
        """Return the request that `tenant` displaces if there are too many, in number or in image bytes."""
        interactive = [pending for pending in self._pending if not pending.request.background]
        if len(interactive) >= self._capacity:
            capacity, weights = self._capacity, [1] * len(interactive)
        else:
            capacity, weights = MAX_IMAGE_BYTES, [pending.image_bytes for pending in interactive]
            if sum(weights) <= capacity:
                return None
        usage: Counter[str] = Counter()
        for pending, weight in zip(interactive, weights, strict=True):
            usage[pending.request.tenant] += weight
        displaced = tenant_to_displace(usage, tenant, capacity)
        newest_first = zip(reversed(interactive), reversed(weights), strict=True)
        for pending, weight in newest_first:
            if weight and pending.request.tenant == displaced and not pending.request.resumed:
                return pending
        raise EngineOverloaded(PREPARING)

    def _compile(self, request: EngineRequest) -> tuple[Future[GrammarState], ...]:
        """Start compiling the grammar of a request, and advancing it to where each resumed choice is."""
        grammar, compiler = request.sampling.grammar, self._compiler()
        assert grammar is not None
        outputs = [request.resumed[choice].tokens for choice in request.open_choices] if request.resumed else [[]]
        return tuple(
            compiler.compile(grammar, request.tenant, request.cache_key, output, background=request.background)
            for output in outputs
        )

    def _compiler(self) -> GrammarCompiler:
        if self.compiler is None:
            if self._tokenizer_json is None:
                raise InvalidRequest(
                    "This engine was started without a tokenizer, so it has no grammars.", param="grammar"
                )
            from syringa.engine.structured_output.compiler import GrammarCompiler

            eos_tokens = sorted(self._loaded.description.end_tokens)
            self.compiler = GrammarCompiler(self._tokenizer_json(), self._loaded.info.vocab_size, eos_tokens)
        return self.compiler
