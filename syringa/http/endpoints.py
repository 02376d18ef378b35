"""The table of endpoints: the only place where a path is declared.

Routing, authentication, metrics, the access log, draining and the OpenAPI document are all derived from it. A new
endpoint is one entry here and a handler in `syringa.http.routes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from syringa.api.batches import BatchEndpoint
from syringa.api.openapi import admin_operations as admin
from syringa.api.openapi import anthropic_operations as anthropic
from syringa.api.openapi import batch_operations as batch
from syringa.api.openapi import embedding_operations as embedding
from syringa.api.openapi import ollama_operations as ollama
from syringa.api.openapi import operations as core
from syringa.api.openapi import responses_operations as responses
from syringa.api.openapi.document import PublishedOperation, document
from syringa.http.routes.admin import AdminRoutes
from syringa.http.routes.anthropic import AnthropicRoutes
from syringa.http.routes.batches import BatchRoutes
from syringa.http.routes.console import ConsoleRoutes
from syringa.http.routes.conversations import ConversationRoutes
from syringa.http.routes.embeddings import EmbeddingRoutes
from syringa.http.routes.files import FileRoutes
from syringa.http.routes.fleet import FleetRoutes
from syringa.http.routes.listings import ListingRoutes
from syringa.http.routes.me import CallerRoutes
from syringa.http.routes.model_admin import ModelAdminRoutes
from syringa.http.routes.model_pulls import ModelPullRoutes
from syringa.http.routes.models import ModelRoutes
from syringa.http.routes.ollama import OllamaRoutes
from syringa.http.routes.ollama_models import OllamaModelRoutes
from syringa.http.routes.openai import OpenAIRoutes
from syringa.http.routes.replicas import ReplicaRoutes
from syringa.http.routes.responses import ResponseRoutes
from syringa.http.routes.series import SeriesRoutes
from syringa.http.routes.server_info import ServerInfoRoutes
from syringa.http.routes.system import SystemRoutes
from syringa.http.routes.websocket import ResponsesWebSocket
from syringa.http.routing import WEBSOCKET, Access, Endpoint


@dataclass(frozen=True)
class Handlers:
    """The objects whose methods handle requests, one set for each app."""

    openai: OpenAIRoutes
    anthropic: AnthropicRoutes
    models: ModelRoutes
    embeddings: EmbeddingRoutes
    ollama: OllamaRoutes
    ollama_models: OllamaModelRoutes
    console: ConsoleRoutes
    me: CallerRoutes
    system: SystemRoutes
    info: ServerInfoRoutes
    responses: ResponseRoutes
    websocket: ResponsesWebSocket
    conversations: ConversationRoutes
    listings: ListingRoutes
    files: FileRoutes
    batches: BatchRoutes
    admin: AdminRoutes
    model_admin: ModelAdminRoutes
    model_pulls: ModelPullRoutes
    replicas: ReplicaRoutes
    fleet: FleetRoutes
    series: SeriesRoutes


_CONVERSATION = "/v1/conversations/{conversation_id}"
_MODEL_CONFIGURATION = "/admin/models/{model_id:path}"

# fmt: off
ENDPOINTS: tuple[Endpoint, ...] = (
    # Inference
    Endpoint("POST", "/v1/chat/completions", lambda h: h.openai.chat, core.CREATE_CHAT_COMPLETION, metered=True),
    Endpoint("POST", "/api/v2/chat/completions", lambda h: h.openai.chat, core.CREATE_CHAT_COMPLETION_V2, metered=True),
    Endpoint("POST", "/v1/completions", lambda h: h.openai.completions, core.CREATE_COMPLETION, metered=True),
    Endpoint("POST", "/api/v2/completions", lambda h: h.openai.completions, core.CREATE_COMPLETION_V2, metered=True),
    Endpoint("POST", "/v1/embeddings", lambda h: h.embeddings.embeddings, embedding.CREATE_EMBEDDING, metered=True),
    Endpoint("POST", "/api/v2/embeddings", lambda h: h.embeddings.embeddings, embedding.CREATE_EMBEDDING_V2,
             metered=True),
    Endpoint("POST", "/rerank", lambda h: h.embeddings.rerank, embedding.RERANK, metered=True),
    Endpoint("POST", "/v1/rerank", lambda h: h.embeddings.rerank, embedding.RERANK_V1, metered=True),
    Endpoint("POST", "/v2/rerank", lambda h: h.embeddings.rerank_v2, embedding.RERANK_V2, metered=True),
    Endpoint("POST", "/score", lambda h: h.embeddings.score, embedding.SCORE, metered=True),
    Endpoint("POST", "/v1/score", lambda h: h.embeddings.score, embedding.SCORE_V1, metered=True),
    Endpoint("POST", "/v1/messages", lambda h: h.anthropic.create_message, anthropic.CREATE_MESSAGE, metered=True,
             error_format="anthropic"),
    Endpoint("POST", "/v1/messages/count_tokens", lambda h: h.anthropic.count_tokens, anthropic.COUNT_MESSAGE_TOKENS,
             error_format="anthropic"),
    # Ollama's API
    Endpoint("POST", "/api/chat", lambda h: h.ollama.chat, ollama.OLLAMA_CHAT, metered=True, error_format="ollama"),
    Endpoint("POST", "/api/generate", lambda h: h.ollama.generate, ollama.OLLAMA_GENERATE, metered=True,
             error_format="ollama"),
    Endpoint("POST", "/api/embed", lambda h: h.ollama.embed, ollama.OLLAMA_EMBED, metered=True, error_format="ollama"),
    Endpoint("POST", "/api/embeddings", lambda h: h.ollama.embeddings, ollama.OLLAMA_EMBEDDINGS, metered=True,
             error_format="ollama"),
    Endpoint("GET", "/api/tags", lambda h: h.ollama_models.list, ollama.OLLAMA_TAGS, error_format="ollama"),
    Endpoint("GET", "/api/ps", lambda h: h.ollama_models.running, ollama.OLLAMA_PS, error_format="ollama"),
    Endpoint("POST", "/api/show", lambda h: h.ollama_models.show, ollama.OLLAMA_SHOW, error_format="ollama"),
    Endpoint("GET", "/api/version", lambda h: h.ollama_models.version, ollama.OLLAMA_VERSION, Access.PUBLIC,
             monitoring=True, error_format="ollama"),
    Endpoint("POST", "/api/pull", lambda h: h.ollama_models.pull, ollama.OLLAMA_PULL, Access.ADMIN,
             error_format="ollama"),
    Endpoint("POST", "/api/create", lambda h: h.ollama_models.create, ollama.OLLAMA_CREATE, Access.ADMIN,
             error_format="ollama"),
    Endpoint("POST", "/api/copy", lambda h: h.ollama_models.copy, ollama.OLLAMA_COPY, Access.ADMIN,
             error_format="ollama"),
    Endpoint("DELETE", "/api/delete", lambda h: h.ollama_models.delete, ollama.OLLAMA_DELETE, Access.ADMIN,
             error_format="ollama"),
    Endpoint("POST", "/api/push", lambda h: h.ollama_models.push, ollama.OLLAMA_PUSH, error_format="ollama"),
    Endpoint("POST", "/api/blobs/{digest}", lambda h: h.ollama_models.create_blob, ollama.OLLAMA_CREATE_BLOB,
             error_format="ollama"),
    Endpoint("HEAD", "/api/blobs/{digest}", lambda h: h.ollama_models.find_blob, ollama.OLLAMA_FIND_BLOB,
             error_format="ollama"),
    # Models and tokens
    Endpoint("GET", "/v1/models", lambda h: h.models.list, core.LIST_MODELS, shared=True),
    Endpoint("GET", "/api/v2/models", lambda h: h.models.list_openai, core.LIST_MODELS_V2),
    Endpoint("GET", "/v1/models/{id:path}", lambda h: h.models.show, core.SHOW_MODEL, shared=True),
    Endpoint("POST", "/tokenize", lambda h: h.openai.tokenize, core.TOKENIZE),
    Endpoint("POST", "/detokenize", lambda h: h.openai.detokenize, core.DETOKENIZE),
    # The server
    Endpoint("GET", "/", lambda h: h.console.index, core.ROOT, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/console", lambda h: h.console.index, core.CONSOLE, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/console/{path:path}", lambda h: h.console.file, core.CONSOLE_FILE, Access.PUBLIC,
             monitoring=True),
    Endpoint("GET", "/health", lambda h: h.system.health, core.HEALTH, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/ready", lambda h: h.system.ready, core.READY, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/status", lambda h: h.system.status, core.STATUS, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/metrics", lambda h: h.system.metrics, core.METRICS, Access.METRICS, monitoring=True),
    Endpoint("GET", "/openapi.json", lambda h: h.system.openapi, core.OPENAPI, Access.PUBLIC),
    Endpoint("GET", "/docs", lambda h: h.system.docs, core.DOCS, Access.PUBLIC),
    Endpoint("GET", "/v1/me", lambda h: h.me.me, core.ME),
    Endpoint("GET", "/version", lambda h: h.info.version, core.VERSION, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/ping", lambda h: h.system.ready, core.PING, Access.PUBLIC, monitoring=True),
    Endpoint("POST", "/ping", lambda h: h.system.ready, core.PING_POST, Access.PUBLIC, monitoring=True),
    Endpoint("GET", "/load", lambda h: h.info.load, core.LOAD, Access.METRICS, monitoring=True),
    Endpoint("GET", "/tokenizer_info", lambda h: h.info.tokenizer_info, core.TOKENIZER_INFO),
    Endpoint("GET", "/props", lambda h: h.info.props, core.PROPS),
    # Responses
    Endpoint("POST", "/v1/responses", lambda h: h.responses.create, responses.CREATE_RESPONSE, metered=True),
    Endpoint("GET", "/v1/responses", lambda h: h.listings.responses, responses.LIST_RESPONSES),
    Endpoint(WEBSOCKET, "/v1/responses", lambda h: h.websocket, None, metered=True),
    Endpoint("POST", "/v1/responses/input_tokens", lambda h: h.responses.count, responses.COUNT_INPUT_TOKENS),
    Endpoint("POST", "/v1/responses/compact", lambda h: h.responses.compact, responses.COMPACT_RESPONSE, metered=True),
    Endpoint("GET", "/v1/responses/{response_id}", lambda h: h.responses.get, responses.GET_RESPONSE),
    Endpoint("DELETE", "/v1/responses/{response_id}", lambda h: h.responses.delete, responses.DELETE_RESPONSE),
    Endpoint("POST", "/v1/responses/{response_id}/cancel", lambda h: h.responses.cancel, responses.CANCEL_RESPONSE),
    Endpoint("GET", "/v1/responses/{response_id}/input_items", lambda h: h.responses.input_items,
             responses.LIST_INPUT_ITEMS),
    # Conversations
    Endpoint("POST", "/v1/conversations", lambda h: h.conversations.create, responses.CREATE_CONVERSATION),
    Endpoint("GET", "/v1/conversations", lambda h: h.listings.conversations, responses.LIST_CONVERSATIONS),
    Endpoint("GET", _CONVERSATION, lambda h: h.conversations.get, responses.GET_CONVERSATION),
    Endpoint("POST", _CONVERSATION, lambda h: h.conversations.update, responses.UPDATE_CONVERSATION),
    Endpoint("DELETE", _CONVERSATION, lambda h: h.conversations.delete, responses.DELETE_CONVERSATION),
    Endpoint("GET", _CONVERSATION + "/items", lambda h: h.conversations.list_items, responses.LIST_CONVERSATION_ITEMS),
    Endpoint("POST", _CONVERSATION + "/items", lambda h: h.conversations.add_items,
             responses.CREATE_CONVERSATION_ITEMS),
    Endpoint("GET", _CONVERSATION + "/items/{item_id}", lambda h: h.conversations.get_item,
             responses.GET_CONVERSATION_ITEM),
    Endpoint("DELETE", _CONVERSATION + "/items/{item_id}", lambda h: h.conversations.delete_item,
             responses.DELETE_CONVERSATION_ITEM),
    # Files and batches
    Endpoint("POST", "/v1/files", lambda h: h.files.upload, batch.UPLOAD_FILE, upload=True),
    Endpoint("GET", "/v1/files", lambda h: h.files.list, batch.LIST_FILES),
    Endpoint("GET", "/v1/files/{file_id}", lambda h: h.files.get, batch.GET_FILE),
    Endpoint("DELETE", "/v1/files/{file_id}", lambda h: h.files.delete, batch.DELETE_FILE),
    Endpoint("GET", "/v1/files/{file_id}/content", lambda h: h.files.content, batch.GET_FILE_CONTENT),
    Endpoint("POST", "/v1/batches", lambda h: h.batches.create, batch.CREATE_BATCH),
    Endpoint("GET", "/v1/batches", lambda h: h.batches.list, batch.LIST_BATCHES),
    Endpoint("GET", "/v1/batches/{batch_id}", lambda h: h.batches.get, batch.GET_BATCH),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", lambda h: h.batches.cancel, batch.CANCEL_BATCH),
    # Administration
    Endpoint("GET", "/admin/keys", lambda h: h.admin.list_keys, admin.LIST_KEYS, Access.ADMIN),
    Endpoint("POST", "/admin/keys", lambda h: h.admin.create_key, admin.CREATE_KEY, Access.ADMIN),
    Endpoint("GET", "/admin/keys/{key_id}", lambda h: h.admin.show_key, admin.SHOW_KEY, Access.ADMIN),
    Endpoint("DELETE", "/admin/keys/{key_id}", lambda h: h.admin.revoke_key, admin.REVOKE_KEY, Access.ADMIN),
    Endpoint("GET", "/admin/organizations", lambda h: h.admin.list_organizations, admin.LIST_ORGANIZATIONS,
             Access.ADMIN),
    Endpoint("GET", "/admin/organizations/{organization_id}", lambda h: h.admin.show_organization,
             admin.SHOW_ORGANIZATION, Access.ADMIN),
    Endpoint("PUT", "/admin/organizations/{organization_id}", lambda h: h.admin.set_organization,
             admin.SET_ORGANIZATION, Access.ADMIN),
    Endpoint("GET", "/admin/models", lambda h: h.model_admin.list, admin.LIST_MODEL_CONFIGURATIONS, Access.ADMIN),
    Endpoint("GET", "/admin/models/available", lambda h: h.model_pulls.available, admin.LIST_AVAILABLE_MODELS,
             Access.ADMIN),
    Endpoint("POST", "/admin/models/pull", lambda h: h.model_pulls.start, admin.PULL_MODEL, Access.ADMIN),
    Endpoint("GET", "/admin/models/pulls", lambda h: h.model_pulls.list, admin.LIST_PULLS, Access.ADMIN),
    Endpoint("GET", "/admin/models/pulls/{pull_id}", lambda h: h.model_pulls.show, admin.SHOW_PULL, Access.ADMIN),
    Endpoint("DELETE", "/admin/models/pulls/{pull_id}", lambda h: h.model_pulls.end, admin.END_PULL, Access.ADMIN),
    Endpoint("POST", _MODEL_CONFIGURATION + "/load", lambda h: h.model_admin.load, admin.LOAD_MODEL, Access.ADMIN),
    Endpoint("POST", _MODEL_CONFIGURATION + "/unload", lambda h: h.model_admin.unload, admin.UNLOAD_MODEL,
             Access.ADMIN),
    Endpoint("GET", _MODEL_CONFIGURATION, lambda h: h.model_admin.show, admin.SHOW_MODEL_CONFIGURATION, Access.ADMIN),
    Endpoint("PUT", _MODEL_CONFIGURATION, lambda h: h.model_admin.put, admin.CONFIGURE_MODEL, Access.ADMIN),
    Endpoint("DELETE", _MODEL_CONFIGURATION, lambda h: h.model_admin.delete, admin.REMOVE_MODEL, Access.ADMIN),
    Endpoint("GET", "/admin/replicas", lambda h: h.replicas.list, admin.LIST_REPLICAS, Access.ADMIN),
    Endpoint("POST", "/admin/replicas/{replica_id}/drain", lambda h: h.replicas.drain, admin.DRAIN_REPLICA,
             Access.ADMIN),
    Endpoint("GET", "/admin/nodes", lambda h: h.fleet.list_nodes, admin.LIST_NODES, Access.ADMIN),
    Endpoint("POST", "/admin/nodes/{node}/drain", lambda h: h.fleet.drain_node, admin.DRAIN_NODE, Access.ADMIN),
    Endpoint("GET", "/admin/pools", lambda h: h.fleet.list_pools, admin.LIST_POOLS, Access.ADMIN),
    Endpoint("GET", "/admin/moves", lambda h: h.fleet.list_moves, admin.LIST_MOVES, Access.ADMIN),
    Endpoint("POST", "/admin/pools/{pool}/open", lambda h: h.fleet.open_pool, admin.OPEN_POOL, Access.ADMIN),
    Endpoint("POST", "/admin/pools/{pool}/close", lambda h: h.fleet.close_pool, admin.CLOSE_POOL, Access.ADMIN),
    Endpoint("POST", "/admin/pools/{pool}/reset", lambda h: h.fleet.reset_pool, admin.RESET_POOL, Access.ADMIN),
    # Usage
    Endpoint("GET", "/admin/series", lambda h: h.series.series, admin.SERIES, Access.ADMIN),
    Endpoint("GET", "/admin/usage", lambda h: h.admin.usage, admin.USAGE, Access.ADMIN),
    Endpoint("GET", "/v1/usage", lambda h: h.admin.own_usage, admin.OWN_USAGE),
)
# fmt: on

BATCH_ENDPOINTS: tuple[Endpoint, ...] = tuple(
    each for each in ENDPOINTS if each.method == "POST" and each.path in get_args(BatchEndpoint)
)
"""The endpoints whose requests the lines of a batch may be."""

PUBLISHED: tuple[PublishedOperation, ...] = tuple(
    PublishedOperation(
        each.method.lower(),
        each.path.replace(":path}", "}"),
        each.operation,
        each.access is Access.PUBLIC,
        each.error_format,
        each.shared,
    )
    for each in ENDPOINTS
    if each.operation is not None
)


def openapi_document(*, secured: bool, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of all published endpoints. `secured`: API keys are configured."""
    return document(PUBLISHED, secured=secured, root_path=root_path)
