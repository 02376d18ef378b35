"""`/v1/responses`: create one, and what can be done with those that are stored."""

from __future__ import annotations

import contextlib
import functools

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.api.responses import CompactRequest, InputTokensRequest, ResponseRequest, count_input, prepare_compaction
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONOURED_INCLUDES
from syringa.errors import InvalidRequest, NotFound, StoreUnavailable
from syringa.http import dependencies
from syringa.http.routes import background
from syringa.http.routes.response_run import Turn, Turns
from syringa.http.routing import Route
from syringa.http.streaming.framing import DONE, Framing, named
from syringa.http.streaming.sse import StreamedAnswer, WholeAnswer, collected
from syringa.service.app_state import Work
from syringa.service.responses import process_identity
from syringa.service.responses import record as records
from syringa.service.responses.history import decoded
from syringa.store import ACTIVE, Page, Running, StoredResponse


class Responses:
    """The handlers."""

    def __init__(self, turns: Turns, work: Work) -> None:
        self._turns, self._work = turns, work
        self._config, self._state = turns.config, work.state

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count, methods=["POST"]),
            Route("/v1/responses/compact", self.compact, methods=["POST"]),
            Route("/v1/responses/{response_id}", self.get),
            Route("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", self.input_items),
        ]

    async def create(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, ResponseRequest)
        open_mode = dependencies.open_mode(request, self._config)
        turn = await self._turns.prepare(body, ignored, dependencies.account(request), open_mode=open_mode)
        headers = dependencies.heed(self._config, ignored)
        if body.background:
            run, response = await background.begin(self._turns, turn, self._work)
            if not body.stream:
                return dependencies.json(response, headers)
            return background.following(
                run.follow(-1), open_mode=open_mode, headers=headers, keep_alive=self._config.keep_alive
            )
        await self._turns.begin(turn)
        if body.stream:
            return self._streamed(turn, open_mode, headers)
        return WholeAnswer(turn.whole, headers=headers)

    def _streamed(self, turn: Turn, open_mode: bool, headers: dict[str, str]) -> StreamedAnswer:
        done = DONE if open_mode else b""
        framing = Framing(named, lambda error: b"".join([named(event) for event in turn.failure]) + done, done)
        return StreamedAnswer(
            turn.run,
            turn.writer.write,
            framing,
            headers=headers,
            keep_alive=self._config.keep_alive,
            opening=turn.writer.begin,
        )

    async def get(self, request: Request) -> Response:
        organisation, id = dependencies.organisation(request), request.path_params["response_id"]
        query = request.query_params
        check_include(query)
        stream = dependencies.truth(query, "stream")
        after = dependencies.whole_number(query, "starting_after", -1, low=0, high=2**63 - 1)
        if dependencies.truth(query, "include_obfuscation"):
            raise InvalidRequest("include_obfuscation: streams are not padded here.", param="include_obfuscation")
        if after >= 0 and not stream:
            raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
        found, response = await self._read(organisation, id)
        if not stream:
            return dependencies.json(response)
        if not found.background:
            raise InvalidRequest(
                f"The response {id!r} did not run in the background: only the events of those are kept.", param="stream"
            )
        source = background.source(self._work, self._state.store, organisation, id, after)
        open_mode = dependencies.open_mode(request, self._config)
        return background.following(source, open_mode=open_mode, headers={}, keep_alive=self._config.keep_alive)

    async def delete(self, request: Request) -> Response:
        organisation, id = dependencies.organisation(request), request.path_params["response_id"]
        run = self._work.background.find(organisation, id)
        if not await self._state.store.delete_response(organisation, id):
            raise _missing(id)
        if run is not None:
            run.ask_to_cancel()
        return dependencies.json({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        organisation, id = dependencies.organisation(request), request.path_params["response_id"]
        if (run := self._work.background.find(organisation, id)) is not None:
            await run.cancel()
            return dependencies.json(run.response or (await self._read(organisation, id))[1])
        found, response = await self._read(organisation, id)
        if not found.background:
            raise InvalidRequest(
                f"The response {id!r} does not run in the background; close its connection to cancel it."
            )
        if found.status in ACTIVE:
            # Another process runs it, and finds out by its next heartbeat.
            response |= {"status": "cancelled"}
            body = msgspec.json.encode(response).decode()
            await self._state.store.finish_response(organisation, id, status="cancelled", body=body)
            _, response = await self._read(organisation, id)
        return dependencies.json(response)

    async def input_items(self, request: Request) -> Response:
        organisation, id = dependencies.organisation(request), request.path_params["response_id"]
        query = dependencies.page_query(request.query_params)
        check_include(request.query_params)
        page = await self._state.store.input_items(
            organisation, id, after=query.after, before=query.before, limit=query.limit, order=query.order
        )
        if page is None:
            raise _missing(id)
        return dependencies.json(listed(page))

    async def count(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, InputTokensRequest)
        context = await self._turns.context(body, dependencies.organisation(request))
        models = self._turns.models.for_key(dependencies.caller(request).models)
        counted = await count_input(body, models, ignored, context)
        return dependencies.json(counted, dependencies.heed(self._config, ignored))

    async def compact(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, CompactRequest)
        account = dependencies.account(request)
        context = await self._turns.context(body, account.caller.organisation)
        models = self._turns.models.for_key(account.caller.models)
        call = await prepare_compaction(body, models, ignored, context)
        headers = dependencies.heed(self._config, ignored)
        run = self._turns.desk.run(call, account)
        return WholeAnswer(functools.partial(collected, run, call.writer), headers=headers)

    async def _read(self, organisation: str, id: str) -> tuple[StoredResponse, records.Response]:
        store = self._state.store
        found = await records.read(store, organisation, id)
        if found is not None and found[0].owner is not None and process_identity.is_gone(found[0].owner):
            with contextlib.suppress(StoreUnavailable):  # somebody holds it for long: then it is as it was
                await self._state.fail_orphans(Running(organisation, id))
            found = await records.read(store, organisation, id)
        if found is None:
            raise _missing(id)
        return found


def listed(page: Page) -> dict[str, object]:
    """A page in OpenAI's shape."""
    ids = [item.id for item in page.items]
    return {
        "object": "list",
        "data": decoded(page.items),
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": page.has_more,
    }


def check_include(query: QueryParams) -> None:
    """What a stored response has, it shows; what was not asked for when it was made cannot be had now."""
    known = (*HONOURED_INCLUDES, *EMPTY_INCLUDES)
    for name in (*query.getlist("include"), *query.getlist("include[]")):
        if name not in known:
            raise InvalidRequest(f"include: expected some of {', '.join(known)}, not {name!r}.", param="include")


def _missing(id: str) -> NotFound:
    return NotFound(f"There is no response {id!r}.", code="response_not_found")
