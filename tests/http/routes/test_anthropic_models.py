"""Models as clients of Anthropic's API see them: the list, their names, and the path that clients probe."""

from __future__ import annotations

from tests.chat_models import plain_model
from tests.http.anthropic_client import anthropic_client, check_error


async def test_models_answer_in_the_shape_that_the_client_knows() -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with anthropic_client() as http:
        assert (await http.get("/v1/models")).json()["object"] == "list"
        assert (await http.get("/v1/models", headers={"authorization": "Bearer k", "x-api-key": "k"})).json()["object"]
        for headers in (version, {"x-api-key": "dummy"}):
            page = (await http.get("/v1/models?limit=1000", headers=headers)).json()
            (model,) = page.pop("data")
            assert page == {"has_more": False, "first_id": "fake", "last_id": "fake"}
            assert (await http.get("/v1/models/alias", headers=headers)).json() == model
            assert model.pop("created_at").endswith("Z")
            assert model == {
                "type": "model", "id": "fake", "display_name": "fake", "max_input_tokens": 4096, "max_tokens": 4096,
                "lifecycle": "active",
            }  # fmt: skip
        answer = await http.get("/v1/models/none", headers=version)
        assert (answer.status_code, check_error(answer)["type"]) == (404, "not_found_error")
        answer = await http.get("/v1/models?limit=0", headers=version)
        assert check_error(answer)["message"] == "limit: expected a whole number from 1 to 1000, not '0'."


async def test_claude_names_reach_the_model_that_has_the_pattern() -> None:
    async with anthropic_client(model=plain_model(aliases=("claude-*",))) as http:
        assert (await http.create(model="claude-opus-4-5"))["model"] == "fake"
        assert await http.count(model="claude-3-5-haiku-latest") == len("[u]hi[a]")
        error = await http.error(404, model="gpt-5")
        assert error["message"].startswith("The model 'gpt-5' does not exist.")


async def test_root_answers_head_and_get_without_a_key() -> None:
    async with anthropic_client(api_key=("k",)) as http:
        assert (await http.head("/")).status_code == 200
        assert (await http.head("/?beta=true")).status_code == 200
        assert (await http.get("/")).status_code == 200


async def test_model_list_takes_anthropics_query() -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with anthropic_client() as http:
        for query, ids in (
            ("", ["fake"]),
            ("?limit=1", ["fake"]),
            ("?after_id=fake", []),
            ("?before_id=fake", []),
            ("?lifecycle=active", ["fake"]),
            ("?lifecycle[]=retired&lifecycle[]=active", ["fake"]),
            ("?lifecycle[]=retired", []),
        ):
            page = (await http.get("/v1/models" + query, headers=version)).json()
            assert [each["id"] for each in page["data"]] == ids, query
            assert page["has_more"] is False
        answer = await http.get("/v1/models?after_id=none", headers=version)
        assert (answer.status_code, check_error(answer)["message"]) == (404, "after_id: there is no model 'none'.")


async def test_errors_of_models_have_the_envelope_of_the_api_that_the_client_uses() -> None:
    async with anthropic_client(api_key=("k",)) as http:
        for headers in ({"anthropic-version": "2023-06-01"}, {"x-api-key": "wrong"}):
            for path in ("/v1/models", "/v1/models/fake", "/v1/nothing"):
                answer = await http.get(path, headers=headers)
                assert (answer.status_code, check_error(answer)["type"]) == (401, "authentication_error")
                assert answer.headers["request-id"] == answer.headers["x-request-id"]
        answer = await http.get("/v1/models/none", headers={"x-api-key": "k"})
        assert (answer.status_code, check_error(answer)["type"]) == (404, "not_found_error")
        answer = await http.get("/v1/models/none", headers={"authorization": "Bearer k"})
        assert (answer.status_code, set(answer.json())) == (404, {"error"})
        assert "request-id" not in answer.headers
        # An endpoint of OpenAI's API alone has its envelope, whatever the client sends.
        answer = await http.post("/v1/chat/completions", json={}, headers={"anthropic-version": "2023-06-01"})
        assert (answer.status_code, set(answer.json())) == (401, {"error"})
