"""Rerank by Cohere's package. It runs in the environment of that package.

python cohere_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys

import cohere
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
QUERY = "When do the lilacs bloom?"
DOCUMENTS = ["The train to Hamburg is late.", "Lilacs bloom in May.", "Bread is baked from flour and water."]


def check_client_v2_ranks_documents():
    client = cohere.ClientV2(api_key=KEY, base_url=URL)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert answer.results[0].index == 1
    assert len(answer.results) == 2
    assert answer.results[0].relevance_score > 0.6 > answer.results[1].relevance_score
    assert answer.meta.billed_units.search_units == 1
    assert answer.id


def check_client_v1_returns_documents():
    client = cohere.Client(api_key=KEY, base_url=URL)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, return_documents=True)
    assert answer.results[0].index == 1
    assert answer.results[0].document.text == DOCUMENTS[1]
    answer = client.rerank(model=MODEL, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], top_n=1)
    assert [each.index for each in answer.results] == [1]


def check_errors_are_those_of_the_package():
    client = cohere.ClientV2(api_key=KEY, base_url=URL)
    error = expect_error(cohere.BadRequestError, client.rerank, model=MODEL, query="", documents=DOCUMENTS)
    assert "query" in str(error.body)
    expect_error(cohere.NotFoundError, client.rerank, model="nothing", query=QUERY, documents=DOCUMENTS)
    wrong = cohere.ClientV2(api_key="wrong", base_url=URL)
    expect_error(cohere.UnauthorizedError, wrong.rerank, model=MODEL, query=QUERY, documents=DOCUMENTS)


run_checks(dict(globals()))
