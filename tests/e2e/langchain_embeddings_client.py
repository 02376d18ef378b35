"""`OpenAIEmbeddings` of LangChain. It runs in the environment of that package.

python langchain_embeddings_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import sys

from client_checks import run_checks
from langchain_openai import OpenAIEmbeddings

URL, KEY, MODEL = sys.argv[1:]
# By default, it sends the token ids of OpenAI's tokenizer.
EMBEDDINGS = OpenAIEmbeddings(model=MODEL, base_url=URL + "/v1", api_key=KEY, check_embedding_ctx_length=False)
TEXTS = ["Lilacs bloom in May.", "The train to Hamburg is late.", "Bread is baked from flour and water."]


def check_nearest_document_is_found():
    documents = EMBEDDINGS.embed_documents(TEXTS)
    assert [len(vector) for vector in documents] == [384] * 3
    for index, text in enumerate(("When do the lilacs bloom?", "delayed railway", "what is in a loaf?")):
        query = EMBEDDINGS.embed_query(text)
        scores = [sum(x * y for x, y in zip(query, vector, strict=True)) for vector in documents]
        assert scores.index(max(scores)) == index, (text, scores)


def check_embeddings_are_asynchronous():
    async def embed():
        return await EMBEDDINGS.aembed_documents(TEXTS), await EMBEDDINGS.aembed_query(TEXTS[0])

    documents, query = asyncio.run(embed())
    assert all(abs(x - y) < 1e-3 for x, y in zip(documents[0], query, strict=True))


run_checks(dict(globals()))
