"""Files and batches with the official `openai` package: `python openai_batches_client.py URL KEY MODEL`."""

from __future__ import annotations

import io
import json
import sys
import time

from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Batch, Completion, FileDeleted, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

url, key, model = sys.argv[1:4]
client = OpenAI(base_url=f"{url}/v1", api_key=key)


def line(custom_id: str, **body: object) -> str:
    given = {"model": model, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4, "seed": 1}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": given | body}
    return json.dumps(request)


def upload(*lines: str) -> str:
    file = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    return file.id


def wait(id: str):  # type: ignore[no-untyped-def]
    while (batch := client.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        time.sleep(0.1)
    return batch


def check_flow() -> None:
    id = upload(line("one"), line("two"), line("hot", temperature=9), "{")
    batch = client.batches.create(
        input_file_id=id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"a": "b"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert batch.status == "validating"
    done = wait(batch.id)
    assert done.status == "completed", done
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 2, 2)
    assert done.metadata == {"a": "b"}
    output = [json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in output] == ["one", "two"]
    direct = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "one"}], max_tokens=4, seed=1
    )
    answer = output[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == direct.choices[0].message.content, "a seeded request has the same answer in a batch"
    errors = [json.loads(each) for each in client.files.content(done.error_file_id).iter_lines()]
    assert [each["response"] and each["response"]["status_code"] for each in errors] == [400, None]
    file = client.files.retrieve(done.output_file_id)
    assert file.purpose == "batch_output"
    assert file.expires_at == file.created_at + 7200
    assert done.id in [each.id for each in client.batches.list(limit=1)]  # over all pages
    assert id in [each.id for each in client.files.list(limit=2, purpose="batch")]
    assert client.files.delete(id).deleted


def check_types() -> None:
    """Bodies are valid for the types of the package, which it does not check by itself."""
    bodies = {
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, ChatCompletion),
        "/v1/completions": ({"prompt": "Hi", "max_tokens": 4}, Completion),
        "/v1/responses": ({"input": "Hi", "max_output_tokens": 16, "store": False}, Response),
    }
    for endpoint, (body, kind) in bodies.items():
        request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": model, **body}}
        content = io.BytesIO(json.dumps(request).encode())
        uploaded = client.files.with_raw_response.create(file=("in.jsonl", content), purpose="batch").text
        file = FileObject.model_validate_json(uploaded, strict=True)
        created = client.batches.with_raw_response.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        ).text
        id = Batch.model_validate_json(created, strict=True).id
        assert wait(id).status == "completed"
        done = Batch.model_validate_json(client.batches.with_raw_response.retrieve(id).text, strict=True)
        (output,) = [json.loads(each) for each in client.files.content(done.output_file_id).text.splitlines()]
        assert sorted(output) == ["custom_id", "error", "id", "response"]
        assert sorted(output["response"]) == ["body", "request_id", "status_code"]
        kind.model_validate(output["response"]["body"])
        deleted = client.files.with_raw_response.delete(file.id).text
        assert FileDeleted.model_validate_json(deleted, strict=True).deleted


def check_cancel() -> None:
    id = upload(*(line(str(number), max_tokens=200, ignore_eos=True) for number in range(200)))
    batch = client.batches.create(input_file_id=id, endpoint="/v1/chat/completions", completion_window="24h")
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait(batch.id)
    assert done.status == "cancelled"
    assert done.request_counts.completed < 200


def check_errors() -> None:
    failed = wait(
        client.batches.create(
            input_file_id=upload("nonsense"), endpoint="/v1/chat/completions", completion_window="24h"
        ).id
    )
    assert failed.status == "failed"
    assert failed.errors.data[0].code == "invalid_json_line"
    assert failed.errors.data[0].line == 1
    assert error_of(lambda: client.files.retrieve("file-none"), NotFoundError).code == "file_not_found"
    refused = error_of(lambda: client.files.create(file=("a", b"x"), purpose="vision"), BadRequestError)
    assert refused.param == "purpose"


def error_of(call, kind):  # type: ignore[no-untyped-def]
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


for check in (check_flow, check_types, check_cancel, check_errors):
    check()
print("passed")
