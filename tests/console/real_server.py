"""A real server with models for everything that the console does, with keys or without any."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from playwright.async_api import Browser, Page

from syringa.modelfiles import locate
from tests.console.browser import Watched, open_page
from tests.e2e.server import serve
from tests.e2e.test_vision import TEMPLATE as VISION_TEMPLATE
from tests.engine.embedding.tiny_encoders import save_encoder
from tests.engine.vision.tiny_models import save as save_vision

# Prices of a million tokens, so that a token costs some dollars. "endless" and "brief" are SmolLM2, by the same
# worker, with answers of another length. SmolLM2 neither thinks nor reads images: "thinking" is SmolLM2 with markers of
# reasoning, "vision" a small SmolVLM of random weights.
MODELS = """
[[models]]
id = "smollm2"
path = "{default}"
max_model_len = 4096
prices = {{input = 1000000.0, output = 2000000.0}}
[[models]]
id = "endless"
path = "{default}"
max_model_len = 4096
defaults = {{ignore_eos = true}}
[[models]]
id = "brief"
path = "{default}"
max_model_len = 4096
defaults = {{max_tokens = 8}}
[[models]]
id = "thinking"
path = "{thinking}"
chat_template = "{template}"
max_model_len = 256
[[models]]
id = "vision"
path = "{vision}"
dtype = "fp32"
[[models]]
id = "embedding"
path = "{embedding}"
[[models]]
id = "broken"
path = "/no/such/model"
"""
ORGANIZATION = "acme"


class RealServer(NamedTuple):
    """A server and its keys: of an organization, and of an administrator; "" where it has no keys."""

    url: str
    key: str
    admin: str

    @contextlib.asynccontextmanager
    async def page(
        self, browser: Browser, size: tuple[int, int], *, admin: bool = False, **options: Any
    ) -> AsyncIterator[tuple[Page, Watched]]:
        """Open its console, signed in if it has keys. `options`: of `open_page`."""
        options = {"key": self.admin if admin else self.key, **options}
        async with open_page(browser, self.url, size=size, **options) as opened:
            yield opened

    def http(self, *, admin: bool = True) -> httpx.AsyncClient:
        """Return a client with the key of the administrator, or of the organization."""
        key = self.admin if admin else self.key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)


@contextlib.contextmanager
def real_server(folder: Path, thinking: tuple[str, ...], *, keys: bool) -> Iterator[RealServer]:
    """Run a server. `thinking`: the arguments of a server with the model that reasons."""
    vision, embedding = folder / "vision", folder / "embedding"
    for each in (vision, embedding):
        each.mkdir()
    save_vision("smolvlm", vision)
    (vision / "chat_template.jinja").write_text(VISION_TEMPLATE)
    save_encoder(embedding, "Bert", pooling="mean_tokens")
    settings = folder / "models.toml"
    model, template = thinking[1], thinking[3]
    places = {"default": locate("default").path, "thinking": model, "template": template}
    settings.write_text(MODELS.format(**places, vision=vision, embedding=embedding))
    with serve("--config", str(settings), "--requests-per-minute", "0") as server:
        if not keys:
            yield RealServer(server.url, "", "")
            return
        admin = create_key(server.url, "operators", admin=True)
        yield RealServer(server.url, create_key(server.url, ORGANIZATION, signed_in=admin), admin)


def create_key(url: str, organization: str, *, admin: bool = False, signed_in: str = "") -> str:
    headers = {"authorization": f"Bearer {signed_in}"} if signed_in else {}
    body = {"organization": organization, "name": "browser", "admin": admin}
    return str(httpx.post(f"{url}/admin/keys", json=body, headers=headers).raise_for_status().json()["key"])
