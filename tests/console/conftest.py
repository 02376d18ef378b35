"""A browser and servers for the tests of the console.

Tests of a module share a browser, and so an event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`. Those
with `real` share a real server without keys and, after it, one with keys, and are run in both widths if they have
`size`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.console.browser import DESKTOP, PHONE, chromium
from tests.console.real_server import RealServer, real_server
from tests.e2e.test_replicas import model as thinking  # noqa: F401  a fixture: the settings of a model that reasons


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest.fixture(scope="module", params=[False, True], ids=["no keys", "keys"])
def real(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    thinking: tuple[str, ...],  # noqa: F811
) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("real"), thinking, keys=request.param) as running:
        yield running


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    width, height = request.param
    return width, height
