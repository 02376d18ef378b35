"""Stored responses with the official package: chains, background, conversations, token counting and compaction.

python openai_responses_state_client.py URL KEY MODEL
"""

from __future__ import annotations

import sys
import time
from typing import Any

import openai
from client_checks import expect_error, run_checks
from openai import OpenAI

URL, KEY, MODEL = sys.argv[1:]
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, timeout=300)
# A call returns one of many types, and the checks assert which.
responses: Any = client.responses
conversations: Any = client.conversations

FACTS = "Remember these facts for later. " + " ".join(f"Box number {n} holds {n * 7} marbles." for n in range(1, 25))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Say hello.", "max_output_tokens": 24, "temperature": 0, **fields}


def ask(**fields: Any) -> Any:
    return responses.create(**body(**fields))


def begin(**fields: Any) -> Any:
    """Start a long background response."""
    return ask(background=True, max_output_tokens=1000, extra_body={"ignore_eos": True}, **fields)


def wait_for(response: Any) -> Any:
    end = time.monotonic() + 120
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < end, "the response did not end in time"
        time.sleep(0.1)
        response = responses.retrieve(response.id)
    return response


def texts(items: Any) -> list[str]:
    return [part.text for item in items for part in item.content]


def check_a_chain() -> None:
    one = ask(input=FACTS)
    two = ask(input="How many boxes are there?", previous_response_id=one.id)
    assert two.previous_response_id == one.id
    assert two.usage.input_tokens > one.usage.input_tokens + one.usage.output_tokens
    assert two.usage.input_tokens_details.cached_tokens > one.usage.input_tokens // 2 > 0
    items = [{"role": "user", "content": FACTS}, *one.output, {"role": "user", "content": "How many boxes are there?"}]
    same = ask(input=items, store=False)
    assert (same.output_text, same.usage.input_tokens) == (two.output_text, two.usage.input_tokens)
    instructed = ask(input="Thanks.", previous_response_id=two.id, instructions="Be brief.", stream=True)
    *_, last = instructed
    assert last.response.usage.input_tokens > two.usage.input_tokens


def check_retrieve_and_delete() -> None:
    one = ask()
    assert responses.retrieve(one.id) == one
    assert responses.delete(one.id) is None
    for call in (responses.retrieve, responses.delete, responses.input_items.list):
        assert expect_error(openai.NotFoundError, call, one.id).status_code == 404
    gone = expect_error(openai.BadRequestError, ask, previous_response_id=one.id)
    assert (gone.code, gone.param) == ("previous_response_not_found", "previous_response_id")
    assert one.id in gone.message


def check_input_items() -> None:
    one = ask(input=[{"role": "user", "content": f"Number {n}"} for n in range(5)])
    up = list(responses.input_items.list(one.id, order="asc", limit=2))  # the package asks for page after page
    assert texts(up) == [f"Number {n}" for n in range(5)]
    assert [item.id for item in responses.input_items.list(one.id)] == [item.id for item in reversed(up)]
    page = responses.input_items.list(one.id, order="asc", limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    after = responses.input_items.list(one.id, order="asc", after=page.data[-1].id)
    assert [item.id for item in after] == [item.id for item in up[2:]]
    again = ask(input=[{"type": "item_reference", "id": up[0].id}])
    assert texts(responses.input_items.list(again.id)) == ["Number 0"]


def check_the_background() -> None:
    begun = ask(background=True)
    assert (begun.status, begun.background) == ("queued", True)
    done = wait_for(begun)
    assert (done.status, done.output_text) in [("completed", ask().output_text), ("incomplete", ask().output_text)]
    events = list(responses.retrieve(done.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == done.output_text
    assert list(responses.retrieve(done.id, stream=True, starting_after=3)) == events[4:]
    with responses.stream(response_id=done.id, starting_after=3) as stream:
        assert next(iter(stream)).sequence_number == 4


def check_a_background_stream() -> None:
    with begin(stream=True) as stream:
        seen = [event for event, _ in zip(stream, range(8), strict=False)]
    id = seen[0].response.id
    time.sleep(0.3)
    assert responses.retrieve(id).status == "in_progress"  # it outlives the client
    with responses.retrieve(id, stream=True, starting_after=4) as again:
        assert [event for event, _ in zip(again, range(3), strict=False)] == seen[5:]
    assert responses.cancel(id).status == "cancelled"


def check_cancel() -> None:
    begun = begin()
    assert expect_error(openai.BadRequestError, ask, previous_response_id=begun.id).param == "previous_response_id"
    assert responses.cancel(begun.id).status == "cancelled"
    assert responses.cancel(begun.id).status == "cancelled"
    assert responses.retrieve(begun.id).status == "cancelled"
    assert expect_error(openai.BadRequestError, responses.cancel, ask().id).status_code == 400
    assert expect_error(openai.NotFoundError, responses.cancel, "resp_" + "0" * 32).status_code == 404


def check_conversations() -> None:
    begun: list[Any] = [{"type": "message", "role": "user", "content": "My name is Ann."}]
    talk = conversations.create(metadata={"topic": "names"}, items=begun)
    assert (talk.id[:5], talk.object, talk.metadata) == ("conv_", "conversation", {"topic": "names"})
    one = ask(conversation=talk.id, input="What is my name?")
    assert one.conversation.id == talk.id
    two = ask(conversation={"id": talk.id}, input="Thank you.")
    assert two.usage.input_tokens > one.usage.input_tokens
    items = list(conversations.items.list(talk.id, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert texts(items[:3]) == ["My name is Ann.", "What is my name?", one.output_text]
    assert conversations.items.retrieve(items[1].id, conversation_id=talk.id) == items[1]
    conversations.items.delete(items[0].id, conversation_id=talk.id)
    more: list[Any] = [{"role": "user", "content": "Hello"}]
    assert texts(conversations.items.create(talk.id, items=more).data) == ["Hello"]
    assert len(list(conversations.items.list(talk.id, limit=2))) == 5
    assert conversations.update(talk.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
    assert conversations.retrieve(talk.id).metadata == {"topic": "x"}
    assert conversations.delete(talk.id).deleted
    assert expect_error(openai.NotFoundError, conversations.retrieve, talk.id).status_code == 404
    assert expect_error(openai.NotFoundError, ask, conversation=talk.id).status_code == 404
    assert expect_error(openai.BadRequestError, ask, conversation=talk.id, previous_response_id=one.id).param


def check_counting() -> None:
    count = responses.input_tokens.count
    one = ask(input=FACTS)
    assert count(model=MODEL, input=FACTS).input_tokens == one.usage.input_tokens
    instructed = count(model=MODEL, input=FACTS, instructions="Be brief.")
    assert (
        instructed.input_tokens
        == ask(input=FACTS, instructions="Be brief.").usage.input_tokens
        != one.usage.input_tokens
    )
    chained = count(model=MODEL, input="And now?", previous_response_id=one.id)
    assert chained.object == "response.input_tokens"
    assert chained.input_tokens == ask(input="And now?", previous_response_id=one.id).usage.input_tokens


def check_compacting() -> None:
    one = ask(input="My name is Ann. Where is Paris?")
    for fields in ({"previous_response_id": one.id}, {"input": [{"role": "user", "content": "My name is Ann."}]}):
        small = responses.compact(model=MODEL, **fields)
        assert small.object == "response.compaction"
        *said, summary = small.output
        assert [item.role for item in said] == ["user"]
        assert (summary.type, small.usage.output_tokens > 0) == ("compaction", True)
        asked = {"role": "user", "content": "What is my name?"}
        assert ask(input=[*small.output, asked]).status in ("completed", "incomplete")
    forged = {"type": "compaction", "encrypted_content": "made elsewhere"}
    assert "input[0]" in (expect_error(openai.BadRequestError, ask, input=[forged]).param or "")


def check_nothing_is_stored() -> None:
    """Stateless use. The model has no reasoning, so there is no encrypted content."""
    asked: list[Any] = [{"role": "user", "content": "My name is Ann."}]
    fields: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    one = ask(input=asked, **fields)
    assert one.store is False
    assert expect_error(openai.NotFoundError, responses.retrieve, one.id).status_code == 404
    gone = expect_error(openai.BadRequestError, ask, previous_response_id=one.id, **fields)
    assert gone.code == "previous_response_not_found"
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "made elsewhere"}
    items = [*asked, thought, *one.output, {"role": "user", "content": "What is my name?"}]
    two = responses.with_raw_response.create(**body(input=items, **fields))
    assert two.headers["x-syringa-ignored"] == "input[1].encrypted_content"
    assert two.parse().usage.input_tokens > one.usage.input_tokens


def check_unknown_ids() -> None:
    for call in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
        for id in ("resp_" + "0" * 32, "nothing"):
            assert expect_error(openai.NotFoundError, call, id).request_id
    missing = expect_error(openai.BadRequestError, ask, previous_response_id="resp_none", stream=True)
    assert missing.code == "previous_response_not_found"


if __name__ == "__main__":
    run_checks(globals())
