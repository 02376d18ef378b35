"""The Responses API: create, retrieve, cancel and delete responses, count tokens, and compact conversations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.responses import (
    CompactRequest,
    InputTokensRequest,
    PreparedCount,
    ResponseRequest,
    prepare_compaction,
    prepare_count,
)
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONORED_INCLUDES
from syringa.errors import InvalidRequest, NotFound, StoreUnavailable
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.http.routes import background
from syringa.http.routes.response_run import ResponseRun, ResponseRuns
from syringa.http.streaming.sse import (
    DONE,
    BufferedResponse,
    EventStreamResponse,
    Framing,
    frame_named_event,
    generate_body,
)
from syringa.service.app_state import AppState
from syringa.service.auth.keys import Caller
from syringa.service.responses import process_identity, recorder
from syringa.store import ACTIVE, ItemPage, ResponseKey, StoredEvent, StoredResponse


class ResponseRoutes:
    def __init__(self, runs: ResponseRuns, app_state: AppState) -> None:
        self._runs, self._app_state = runs, app_state
        self._config, self._responses = runs.config, app_state.responses

    async def create(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, ResponseRequest)
        open_mode = dependencies.open_mode(request, self._config)
        run = await self._runs.prepare(
            body,
            ignored,
            dependencies.accounting(request),
            open_mode=open_mode,
            finished=request_context(request.scope).finished_responses,
        )
        headers = dependencies.ignored_fields_header(self._config, ignored)
        if body.background:
            background_response, response = await background.begin(self._runs, run, self._app_state)
            if not body.stream:
                return dependencies.json(response, headers)
            return self._stream_background(request, background_response.follow(-1), open_mode, headers)
        await self._runs.begin(run)
        if body.stream:
            return self._stream(run, open_mode, headers)
        return BufferedResponse(run.run_buffered, headers=headers)

    def _stream(self, run: ResponseRun, open_mode: bool, headers: dict[str, str]) -> EventStreamResponse:
        done = DONE if open_mode else b""
        framing = Framing(
            frame_named_event, lambda error: b"".join([frame_named_event(event) for event in run.failure]) + done, done
        )
        return EventStreamResponse(
            run.run,
            run.writer.write,
            framing,
            headers=headers,
            keep_alive=self._config.keep_alive,
            opening=run.writer.begin,
        )

    async def get(self, request: Request) -> Response:
        organization, id = dependencies.organization(request), request.path_params["response_id"]
        query = request.query_params
        check_include(query)
        stream = dependencies.query_flag(query, "stream")
        after = dependencies.query_int(query, "starting_after", -1, low=0, high=2**63 - 1)
        if dependencies.query_flag(query, "include_obfuscation"):
            raise InvalidRequest("include_obfuscation: not supported.", param="include_obfuscation")
        if after >= 0 and not stream:
            raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
        stored, response = await self._read(organization, id)
        if not stream:
            return dependencies.json(response)
        if not stored.background:
            raise InvalidRequest(
                f"The response {id!r} did not run in the background: only background responses can be streamed again.",
                param="stream",
            )
        events = background.stored_events(self._app_state, self._responses.store, organization, id, after)
        open_mode = dependencies.open_mode(request, self._config)
        return self._stream_background(request, events, open_mode, {})

    def _stream_background(
        self,
        request: Request,
        events: AsyncIterator[Sequence[StoredEvent]],
        open_mode: bool,
        headers: dict[str, str],
    ) -> EventStreamResponse:
        watching = functools.partial(self._app_state.key_watch.watching, dependencies.caller(request))
        return background.stream_response(
            events, watching, open_mode=open_mode, headers=headers, keep_alive=self._config.keep_alive
        )

    async def delete(self, request: Request) -> Response:
        organization, id = dependencies.organization(request), request.path_params["response_id"]
        running = self._app_state.background.find(organization, id)
        if not await self._responses.store.write(lambda session: session.responses.delete(organization, id)):
            raise _response_not_found(id)
        if running is not None:
            running.request_cancel()
        return dependencies.json({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        organization, id = dependencies.organization(request), request.path_params["response_id"]
        if (running := self._app_state.background.find(organization, id)) is not None:
            await running.cancel()
            return dependencies.json(running.response or (await self._read(organization, id))[1])
        stored, response = await self._read(organization, id)
        if not stored.background:
            raise InvalidRequest(
                f"The response {id!r} does not run in the background; close its connection to cancel it."
            )
        if stored.status in ACTIVE:
            # It runs in another process, whose next heartbeat finds it cancelled.
            response |= {"status": "cancelled"}
            body = msgspec.json.encode(response).decode()
            await self._responses.store.write(
                lambda session: session.responses.finish(organization, id, status="cancelled", body=body)
            )
            _, response = await self._read(organization, id)
        return dependencies.json(response)

    async def input_items(self, request: Request) -> Response:
        organization, id = dependencies.organization(request), request.path_params["response_id"]
        query = dependencies.read_page_query(request.query_params)
        check_include(request.query_params)
        page = await self._responses.store.read(
            lambda session: session.responses.input_items(
                organization, id, after=query.after, before=query.before, limit=query.limit, order=query.order
            )
        )
        if page is None:
            raise _response_not_found(id)
        return dependencies.json(item_list(page))

    async def count(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, InputTokensRequest)
        caller = dependencies.caller(request)
        prepared = await self._prepare_count(body, caller, ignored)
        count_images = self._runs.dispatcher.prompt_counter(caller, request_context(request.scope))
        counted = await prepared.count_tokens(count_images)
        return dependencies.json(counted, dependencies.ignored_fields_header(self._config, ignored))

    async def _prepare_count(self, body: InputTokensRequest, caller: Caller, ignored: list[str]) -> PreparedCount:
        """Read the history and render the prompt. At the end, the history no longer takes memory."""
        async with self._runs.context(body, caller.organization) as context:
            return await prepare_count(body, self._runs.models.for_key(caller.models), ignored, context)

    async def compact(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, CompactRequest)
        if body.model is None and dependencies.open_mode(request, self._config):
            raise InvalidRequest("model: required by Open Responses.", param="model")
        accounting = dependencies.accounting(request)
        models = self._runs.models.for_key(accounting.caller.models)
        async with self._runs.context(body, accounting.caller.organization) as context:
            prepared = await prepare_compaction(body, models, ignored, context)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        generation = self._runs.dispatcher.generation_with_usage_event(prepared, accounting)
        return BufferedResponse(functools.partial(generate_body, generation, prepared.writer), headers=headers)

    async def _read(self, organization: str, id: str) -> tuple[StoredResponse, recorder.ResponseObject]:
        store = self._responses.store
        found = await recorder.read_response(store, organization, id)
        if found is not None and found[0].process is not None and process_identity.has_exited(found[0].process):
            with contextlib.suppress(StoreUnavailable):  # the database is busy: return it as it is
                await self._responses.fail_orphans(ResponseKey(organization, id))
            found = await recorder.read_response(store, organization, id)
        if found is None:
            raise _response_not_found(id)
        return found


def item_list(page: ItemPage) -> dict[str, object]:
    """Return a page of items as an OpenAI list object."""
    ids = [item.id for item in page.items]
    return {
        "object": "list",
        "data": [msgspec.Raw(item.json.encode()) for item in page.items],
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": page.has_more,
    }


def check_include(query: QueryParams) -> None:
    """Validate `include`. It has no effect: a stored object is returned with what was included when it was created."""
    known = (*HONORED_INCLUDES, *EMPTY_INCLUDES)
    for name in (*query.getlist("include"), *query.getlist("include[]")):
        if name not in known:
            raise InvalidRequest(f"include: expected some of {', '.join(known)}, not {name!r}.", param="include")


def _response_not_found(id: str) -> NotFound:
    return NotFound(f"There is no response {id!r}.", code="response_not_found")
