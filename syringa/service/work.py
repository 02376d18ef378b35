"""What goes on beside the requests, to be ended in order when the server ends."""

from __future__ import annotations

from syringa.config import Config
from syringa.service.background import Background
from syringa.service.state import State


class Work:
    """Raises `StartupError` for settings that cannot be. Costs nothing until it is used."""

    def __init__(self, config: Config) -> None:
        self.state = State(config)
        self.background = Background(config.max_background)

    async def drain(self, seconds: float) -> None:
        """What runs gets some time to end by itself; what does not is marked as failed."""
        await self.background.drain(seconds)

    async def close(self) -> None:
        await self.background.drain(0)
        await self.state.close()
