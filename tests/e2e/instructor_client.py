"""`instructor` in its modes. It runs in the environment of that package.

python instructor_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated, Literal

import instructor
from client_checks import run_checks
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL, KEY, MODEL = sys.argv[1:]
ASKED = [{"role": "user", "content": "Ann is 31 and lives in Rome; her friends are Bob and Eve."}]
Name = Annotated[str, Field(max_length=12)]


class Person(BaseModel):
    """A person of the text."""

    model_config = ConfigDict(extra="forbid")  # in a schema that leaves them open, a weak model adds keys without end
    name: Name
    age: Annotated[int, Field(ge=0, le=120)]
    mood: Literal["happy", "sad"]
    friends: Annotated[list[Name], Field(max_length=2)]


def ask(mode, **fields):
    client = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key=KEY, timeout=300), mode=mode)
    return client, {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 200, "max_retries": 0, **fields}


def check_modes() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client, fields = ask(mode)
        person = client.chat.completions.create(response_model=Person, **fields)
        assert isinstance(person, Person), mode
        assert person._raw_response.usage.completion_tokens > 0


def check_the_completion_beside_it() -> None:
    client, fields = ask(instructor.Mode.TOOLS)
    person, completion = client.chat.completions.create_with_completion(response_model=Person, **fields)
    (call,) = completion.choices[0].message.tool_calls
    assert Person.model_validate_json(call.function.arguments).model_dump() == person.model_dump()


def check_a_simple_type() -> None:
    client, fields = ask(instructor.Mode.TOOLS)
    assert type(client.chat.completions.create(response_model=int, **fields)) is int


def check_partials() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client, fields = ask(mode)
        seen = list(client.chat.completions.create_partial(response_model=Person, **fields))
        assert len(seen) > 3
        assert seen[0].age is None
        assert Person.model_validate(seen[-1].model_dump())


def check_the_provider() -> None:
    os.environ["OPENAI_API_KEY"] = KEY
    client = instructor.from_provider(f"openai/{MODEL}", base_url=URL + "/v1")
    person = client.chat.completions.create(
        response_model=Person, messages=ASKED, temperature=0, max_tokens=200, max_retries=0
    )
    assert isinstance(person, Person)


def check_the_async_client() -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, timeout=300))
    fields = ask(instructor.Mode.TOOLS)[1]
    assert isinstance(asyncio.run(client.chat.completions.create(response_model=Person, **fields)), Person)


if __name__ == "__main__":
    run_checks(globals())
