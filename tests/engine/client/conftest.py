from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from syringa.engine.client.model_engine import ModelEngine
from tests.engine.client.engine_harness import EngineHarness


@pytest.fixture
def harness() -> EngineHarness:
    return EngineHarness()


@pytest.fixture
async def engine(harness: EngineHarness) -> AsyncIterator[ModelEngine]:
    yield harness.engine
    await harness.engine.close()
