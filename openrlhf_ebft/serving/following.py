"""A replica follows a training run: newer weights are swapped in between requests, without a pause in service."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from openrlhf_ebft.config.serving import FollowConfig
from openrlhf_ebft.serving.run_models import RunModel, complete_models

_LOOK_S = 0.2
log = logging.getLogger(__name__)


class Follower:
    """Looks for newer weights and swaps them in.

    New weights are read and checked while requests run. Then requests that have begun are finished with the old
    weights, requests that arrive meanwhile wait, and the swap itself moves tensors that are in memory already.

    Args:
        config: which run, and how often to look.
        client: vLLM's AsyncLLM.
        base: the model that the engine was started with.

    Attributes:
        version: of the weights that are being served; "start" for those the engine was started with.
        swaps: number of swaps so far.
        refusals: number of newer weights that could not be used.
        fault: why a swap failed half-way, or None; the replica must then be replaced.
    """

    def __init__(self, config: FollowConfig, client: Any, base: str) -> None:
        self._config = config
        self._client = client
        self._base = base
        self._refused: set[str] = set()  # versions that could not be used: not tried again
        self._said: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.version = "start"
        self.swaps = 0
        self.refusals = 0
        self.fault: Exception | None = None

    async def start(self) -> None:
        """Takes the newest weights at once, then looks for newer ones until the process ends."""
        await self.look()
        self._task = asyncio.create_task(self._follow())

    async def look(self) -> bool:
        """One look; True when newer weights are now served. Weights that cannot be used are logged and left alone."""
        if self._config.run is None:
            return False
        for model in await asyncio.to_thread(complete_models, Path(self._config.run), self._say_once):
            if model.version == self.version:
                return False
            if model.version in self._refused:
                continue
            try:
                await self._stage(model)
            except Exception as error:  # the worker's own error arrives wrapped: whatever it is, the old weights stay
                self._say_once(f"{model.weights} cannot be used: {error}")
                self._refused.add(model.version)
                self.refusals += 1
                continue
            await self._swap()
            log.warning("serving %s", model.weights)
            self.version = model.version
            self.swaps += 1
            return True
        return False

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning(line)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            try:
                await self.look()
            except Exception as error:  # told to Ray Serve by the health check, which replaces this replica
                log.exception("a change of weights failed")
                self.fault = error
                return

    async def _stage(self, model: RunModel) -> None:
        await self._client.collective_rpc("stage_weights", args=(self._base, str(model.weights), model.version))
        while not all(await self._client.collective_rpc("staged_weights")):
            await asyncio.sleep(_LOOK_S)

    async def _swap(self) -> None:
        """Changes the weights while nothing runs. A fault here leaves them mixed, so it ends the engine."""
        await self._client.pause_generation(mode="wait", clear_cache=True)
        await self._client.collective_rpc("swap_weights")
        if not await self._client.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a change of weights")
        await self._client.resume_generation()
