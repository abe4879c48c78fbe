"""Ray shell of the rollout engines, and the group that shares a step's requests among them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from openrlhf_ebft.actors.waiting import ActorError, wait_for
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.step_batch import split_by_load
from openrlhf_ebft.distributed.weight_sync import WeightUpdate
from openrlhf_ebft.rollouts.engine import build_engine

logger = logging.getLogger(__name__)


class RolloutEngineActor:
    """One rollout engine in a Ray worker."""

    def __init__(self, config: EBFTConfig, sampling: SamplingSettings, max_model_len: int) -> None:
        self._engine = build_engine(
            config.model.path,
            config.rollout,
            sampling,
            dtype=config.model.dtype,
            max_model_len=max_model_len,
            seed=config.seed,
            threads=config.placement.threads_per_actor,
            trust_remote_code=config.model.trust_remote_code,
        )

    def effective_settings(self) -> dict[str, Any]:
        """The sampling values that are really in force; also says that the engine is up."""
        return self._engine.effective_settings()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return self._engine.generate(requests)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._engine.score(sequences)

    def update_weights(self, update: WeightUpdate) -> None:
        """Applies an update whose chunks are object references."""
        self._engine.update_weights(update, fetch=ray.get)

    def weight_version(self) -> int:
        return self._engine.weight_version

    def transfer(self, method: str, argument: Any) -> None:
        """One call of the GPU transfer protocol: see `EngineFleet`."""
        getattr(self._engine, method)(argument)


class RolloutEngineGroup:
    """Engines that hold the same weights. Requests go to the engine with the least work, decided by size alone."""

    def __init__(self, engines: Sequence[Any], config: EBFTConfig) -> None:
        self.engines = list(engines)
        self._names = [f"rollout engine {i}" for i in range(len(engines))]
        self._timeout_s = config.rollout.timeout_s
        self._max_retries = config.rollout.max_retries

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Rollouts in the order of the requests; waits. A failed engine call is repeated before it is an error."""
        parts = split_by_load([_request_load(request) for request in requests], len(self.engines))
        results: dict[int, Rollout] = {}
        todo = [number for number, part in enumerate(parts) if part]
        for attempt in range(self._max_retries + 1):
            todo, failure = self._attempt(requests, parts, todo, results)
            if failure is None:
                return [results[number] for number in range(len(requests))]
            logger.warning("attempt %d of %d: %s", attempt + 1, self._max_retries + 1, failure)
            if not failure.may_pass:
                break
        raise failure

    def _attempt(
        self,
        requests: Sequence[RolloutRequest],
        parts: Sequence[Sequence[int]],
        todo: Sequence[int],
        results: dict[int, Rollout],
    ) -> tuple[list[int], ActorError | None]:
        """Runs the parts in `todo` and files what came back; returns the parts that failed and one failure."""
        calls = {part: self.engines[part].generate.remote([requests[i] for i in parts[part]]) for part in todo}
        failed: list[int] = []
        failure: ActorError | None = None
        for part, call in calls.items():
            try:
                (rollouts,) = wait_for("rollout", [self._names[part]], [call], self._timeout_s)
            except ActorError as error:
                failed.append(part)
                failure = error
                continue
            results.update(zip(parts[part], rollouts, strict=True))
        return failed, failure

    def update_weights(self, update: WeightUpdate) -> None:
        """Applies the update on every engine; waits, and checks that all publish its version."""
        calls = [engine.update_weights.remote(update) for engine in self.engines]
        wait_for("weight sync", self._names, calls, self._timeout_s)
        self.check_versions(update.version)

    def check_versions(self, version: int) -> None:
        """Raises ActorError unless every engine publishes `version`."""
        calls = [engine.weight_version.remote() for engine in self.engines]
        versions = wait_for("weight sync", self._names, calls, self._timeout_s)
        if set(versions) != {version}:
            raise ActorError(f"weight sync: sent version {version}, engines report {versions}")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of given tokens from every engine; waits."""
        calls = [engine.score.remote(sequences) for engine in self.engines]
        return wait_for("score", self._names, calls, self._timeout_s)

    def effective_settings(self, timeout_s: float, phase: str) -> dict[str, Any]:
        """Waits until every engine is up; settings of the first (all are alike)."""
        calls = [engine.effective_settings.remote() for engine in self.engines]
        return wait_for(phase, self._names, calls, timeout_s)[0]


def _request_load(request: RolloutRequest) -> int:
    """Tokens that a request may cost: its context once, its completions in full."""
    reference = request.reference
    return int(reference.anchors.max()) + request.num_samples * int(reference.max_new_tokens.sum())
