"""`/api/pull`: downloads of models, whose progress the requests for the same one share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from syringa import modelfiles
from syringa.api.fields.schema import doc, ignored_field
from syringa.api.models.downloads import ModelDownloads, PullModel
from syringa.api.ollama.common import StreamField, model_not_found, new_model_id
from syringa.api.ollama.manage import OllamaProgress
from syringa.modelfiles import catalog
from syringa.modelfiles.download import RemoteFile
from syringa.modelfiles.variants import strip_address

OnProgress = Callable[[OllamaProgress], None]


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/pull`."""

    model: Annotated[
        str | None,
        doc("A name of `syringa models --available`, or `hf.co/ORGANIZATION/REPOSITORY`, with `:Q4_K_M` or another."),
    ] = None
    name: Annotated[str | None, doc("Same as `model`, which takes precedence.")] = None
    stream: StreamField = None
    insecure: Annotated[bool | None, ignored_field("Connections are secure; reported if true.")] = None
    username: Annotated[str | None, ignored_field("See `HF_TOKEN`; reported as ignored.")] = None
    password: Annotated[str | None, ignored_field("See `HF_TOKEN`; reported as ignored.")] = None


def name_to_pull(name: str) -> str:
    """Return the name under which the model is downloaded.

    Raises `InvalidRequest` for what is no name, such as a path, and `NotFound` for a model that cannot be downloaded.
    """
    found = strip_address(new_model_id(name))
    if not modelfiles.can_pull(found):
        raise model_not_found(name)
    entry = catalog.find(found)  # Ollama's qwen3:0.6b is qwen3-0.6b here
    return entry.name if entry is not None else found


class ModelPulls:
    """The downloads of an API process, with progress in Ollama's lines."""

    def __init__(self, pull: PullModel = modelfiles.pull) -> None:
        self.downloads = ModelDownloads(pull)

    async def run(self, model: str, on_progress: OnProgress) -> None:
        """Download a model, unless it is here. Raises `FailedDependency`."""
        await self.downloads.run(model, lambda file, done: on_progress(_progress_line(file, done)))


def _progress_line(file: RemoteFile, done: int) -> OllamaProgress:
    digest = f"{'sha256' if file.is_large else 'sha1'}:{file.checksum}"
    return OllamaProgress(status=f"pulling {file.checksum[:12]}", digest=digest, total=file.size, completed=done)
