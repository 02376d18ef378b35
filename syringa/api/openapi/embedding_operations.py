"""Descriptions of the endpoints of embedding models and cross-encoders for the OpenAPI document."""

from __future__ import annotations

from dataclasses import replace

from syringa.api.embeddings import request as embeddings
from syringa.api.embeddings import rerank, score
from syringa.api.embeddings import writer as embeddings_writer
from syringa.api.openapi.operations import POST_ERRORS, Operation

_TAG = "Embeddings"

CREATE_EMBEDDING = Operation(
    id="createEmbedding",
    tag=_TAG,
    summary="Create embeddings",
    description="Returns a vector for each input, in the order of the inputs.",
    request=embeddings.CreateEmbeddingRequest,
    example={"input": ["Lilacs bloom in May.", "The train is late."]},
    response=embeddings_writer.CreateEmbeddingResponse,
    errors=(*POST_ERRORS, 503),
)
CREATE_EMBEDDING_V2 = replace(CREATE_EMBEDDING, id="createEmbeddingV2")

RERANK = Operation(
    id="rerank",
    tag=_TAG,
    summary="Rank documents by their relevance for a query",
    description="With a cross-encoder, or with an embedding model by the cosine similarity of its vectors.",
    request=rerank.RerankRequest,
    example={"query": "When do lilacs bloom?", "documents": ["Lilacs bloom in May.", "The train is late."], "top_n": 1},
    response=rerank.RerankResponse,
    errors=(*POST_ERRORS, 503),
)
RERANK_V1 = replace(RERANK, id="rerankV1")
RERANK_V2 = replace(RERANK, id="rerankV2")

SCORE = Operation(
    id="score",
    tag=_TAG,
    summary="Score pairs of texts",
    description="With a cross-encoder, or with an embedding model by the cosine similarity of its vectors.",
    request=score.ScoreRequest,
    example={"text_1": "When do lilacs bloom?", "text_2": ["Lilacs bloom in May.", "The train is late."]},
    response=score.ScoreResponse,
    errors=(*POST_ERRORS, 503),
)
SCORE_V1 = replace(SCORE, id="scoreV1")
