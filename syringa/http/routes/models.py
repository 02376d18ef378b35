"""The list of models, in the shape of OpenAI's API or of Anthropic's."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.anthropic.models import MAX_PAGE, list_anthropic_models, to_anthropic_model
from syringa.api.models import entries
from syringa.api.models.served_model import Models
from syringa.http import dependencies
from syringa.http.context import request_context


class ModelRoutes:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, request: Request) -> Response:
        if not request_context(request.scope).speaks_anthropic:
            return await self.list_openai(request)
        query = request.query_params
        page = list_anthropic_models(
            await self._for_caller(request).all(),
            after=query.get("after_id") or None,
            before=query.get("before_id") or None,
            limit=dependencies.query_int(query, "limit", 20, low=1, high=MAX_PAGE),
            lifecycles=[*query.getlist("lifecycle"), *query.getlist("lifecycle[]")],
        )
        return dependencies.json(page)

    async def list_openai(self, request: Request) -> Response:
        models = await self._for_caller(request).all()
        return dependencies.json(entries.ModelList("list", [entries.to_model_entry(model) for model in models]))

    async def show(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not id:  # which means the default model in a request body, but no model in a path
            raise HTTPException(404)
        card = await self._for_caller(request).show(id)
        speaks_anthropic = request_context(request.scope).speaks_anthropic
        return dependencies.json(to_anthropic_model(card) if speaks_anthropic else entries.to_model_entry(card))

    def _for_caller(self, request: Request) -> Models:
        return self._models.for_key(dependencies.caller(request).models)
