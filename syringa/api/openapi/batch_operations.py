"""Descriptions of the file and batch endpoints for the OpenAPI document."""

from __future__ import annotations

from syringa.api import batches, files
from syringa.api.openapi.operations import POST_ERRORS, Operation, query_parameter

_STORE_ERRORS = (500, 503)
_FILE = {"file_id": "The id of a file."}
_BATCH = {"batch_id": "The id of a batch."}
_AFTER = {"after": query_parameter("Return those after the one with this id.", type="string")}

UPLOAD_FILE = Operation(
    id="uploadFile",
    tag="Files",
    summary="Upload a file",
    description="The input of a batch: a line of JSON for each request.",
    request=files.UploadFileRequest,
    request_media_type="multipart/form-data",
    example={"file": '{"custom_id": "1", "method": "POST", …}', "purpose": "batch"},
    response=files.FileObject,
    errors=(*POST_ERRORS, 429, 503),
)

LIST_FILES = Operation(
    id="listFiles",
    tag="Files",
    summary="List the files",
    query={
        "purpose": query_parameter("Only files with this purpose.", enum=list(files.PURPOSES)),
        "limit": query_parameter("The maximum number.", type="integer", minimum=1, maximum=10000, default=10000),
        "order": query_parameter("`asc`: oldest first; `desc`: newest first.", enum=["asc", "desc"], default="desc"),
        **_AFTER,
    },
    response=files.FileList,
    errors=(400, 404, *_STORE_ERRORS),
)

GET_FILE = Operation(
    id="getFile",
    tag="Files",
    summary="Retrieve a file",
    response=files.FileObject,
    parameters=_FILE,
    errors=(404, *_STORE_ERRORS),
)

GET_FILE_CONTENT = Operation(
    id="getFileContent",
    tag="Files",
    summary="Retrieve the content of a file",
    response={"type": "string", "format": "binary"},
    media_type="application/octet-stream",
    parameters=_FILE,
    errors=(404, *_STORE_ERRORS),
)

DELETE_FILE = Operation(
    id="deleteFile",
    tag="Files",
    summary="Delete a file",
    description="The input of a batch can be deleted when the batch is finished.",
    response=files.DeletedFile,
    parameters=_FILE,
    errors=(400, 404, *_STORE_ERRORS),
)

CREATE_BATCH = Operation(
    id="createBatch",
    tag="Batches",
    summary="Create a batch",
    description="Runs the requests of an input file when the server has nothing else to do, at the price of batches.",
    request=batches.CreateBatchRequest,
    example={"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    response=batches.BatchObject,
    errors=(*POST_ERRORS, 503),
)

LIST_BATCHES = Operation(
    id="listBatches",
    tag="Batches",
    summary="List the batches, newest first",
    query={
        "limit": query_parameter("The maximum number.", type="integer", minimum=1, maximum=100, default=20),
        **_AFTER,
    },
    response=batches.BatchList,
    errors=(400, 404, *_STORE_ERRORS),
)

GET_BATCH = Operation(
    id="getBatch",
    tag="Batches",
    summary="Retrieve a batch",
    response=batches.BatchObject,
    parameters=_BATCH,
    errors=(404, *_STORE_ERRORS),
)

CANCEL_BATCH = Operation(
    id="cancelBatch",
    tag="Batches",
    summary="Cancel a batch",
    description="Running requests are aborted. The files of a cancelled batch have the results so far.",
    response=batches.BatchObject,
    parameters=_BATCH,
    errors=(400, 404, *_STORE_ERRORS),
)
