"""Ray shell of the rollout engines, and the group that shares a step's requests among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Call, Crew
from openrlhf_ebft.actors.waiting import ActorError, StateLost, wait_for
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.step_batch import split_by_load
from openrlhf_ebft.distributed.weight_sync import WeightUpdate
from openrlhf_ebft.rollouts.adapters import rollout_model
from openrlhf_ebft.rollouts.engine import build_engine

logger = logging.getLogger(__name__)


class RolloutEngineActor:
    """One rollout engine in a Ray worker."""

    def __init__(self, config: EBFTConfig, sampling: SamplingSettings, max_model_len: int) -> None:
        start_pulse()
        self._engine = build_engine(
            rollout_model(config),
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

    def update_weights(self, update: WeightUpdate) -> int:
        """Applies an update whose chunks are object references; returns the version that the engine publishes then."""
        self._engine.update_weights(update, fetch=ray.get)
        return self._engine.weight_version

    def weight_version(self) -> int:
        return self._engine.weight_version

    def forget_prefixes(self) -> None:
        self._engine.forget_prefixes()

    def transfer(self, method: str, argument: Any) -> None:
        """One call of the GPU transfer protocol: see `EngineFleet`."""
        getattr(self._engine, method)(argument)


class RolloutEngineGroup:
    """Engines that hold the same weights. Requests go to the engine with the least work, decided by size alone.

    A lost engine is started again with the weights that the others have, and only its requests are made again. Their
    seeds are their own, so the rollouts are those that the lost engine would have given.
    """

    def __init__(self, crew: Crew, config: EBFTConfig) -> None:
        self._crew = crew
        self._timeout_s = config.rollout.timeout_s
        self._start_timeout_s = config.placement.start_timeout_s
        self._max_retries = config.rollout.max_retries
        self._current_weights: Callable[[], WeightUpdate | None] = lambda: None
        self._replaceable = True

    @property
    def engines(self) -> list[Any]:
        """Handles of the engines that are alive."""
        return list(self._crew.handles)

    def refill_from(self, current_weights: Callable[[], WeightUpdate | None] | None) -> None:
        """Says where a new engine gets the weights of the others from.

        Args:
            current_weights: returns them, or None while they are those of model.path. None instead of a function: a
                single engine cannot be filled, so a lost one is `StateLost`.
        """
        self._replaceable = current_weights is not None
        self._current_weights = current_weights or self._current_weights

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Rollouts in the order of the requests; waits. A failed engine call is repeated before the engine is replaced.

        Raises ActorError for wrong input, and when the budget of restarts is used up.
        """
        parts = split_by_load([_request_load(request) for request in requests], len(self.engines))
        results: dict[int, Rollout] = {}
        todo = [number for number, part in enumerate(parts) if part]
        repeats = 0
        while todo:
            calls = {n: _generate_call([requests[i] for i in parts[n]]) for n in todo}
            came, failures = self._crew.attempt("rollout", calls, self._timeout_s)
            for number, rollouts in came.items():
                results.update(zip(parts[number], rollouts, strict=True))
            failed = [failure for failure in failures.values() if not failure.is_loss]
            if failed:
                logger.warning("attempt %d of %d: %s", repeats + 1, self._max_retries + 1, failed[0])
                if not failed[0].may_pass:
                    raise failed[0]
                repeats += 1
            for number, failure in failures.items():
                # One that fails again and again, for want of memory say, is no better than one that is gone.
                if failure.is_loss or repeats > self._max_retries:
                    self._restart(number, failure)
            repeats = 0 if repeats > self._max_retries else repeats
            todo = list(failures)
        return [results[number] for number in range(len(requests))]

    def update_weights(self, update: WeightUpdate) -> None:
        """Applies the update on every engine; waits, and checks that all publish its version."""
        calls = {n: lambda engine: engine.update_weights.remote(update) for n in range(len(self.engines))}
        versions = self._crew.call("weight sync", calls, self._timeout_s, self._restart_empty)
        _require_version(update.version, list(versions.values()))

    def forget_prefixes(self) -> None:
        """Drops cached keys and values of earlier prompts on every engine; waits."""
        calls = {n: lambda engine: engine.forget_prefixes.remote() for n in range(len(self.engines))}
        self._crew.call("prefix cache", calls, self._timeout_s, self._restart)

    def check_versions(self, version: int) -> None:
        """Raises ActorError unless every engine publishes `version`."""
        calls = [engine.weight_version.remote() for engine in self.engines]
        versions = wait_for("weight sync", self._crew.names, calls, self._timeout_s, self._crew.pulses)
        _require_version(version, versions)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of given tokens from every engine; waits."""
        calls = {n: lambda engine: engine.score.remote(sequences) for n in range(len(self.engines))}
        results = self._crew.call("score", calls, self._timeout_s, self._restart)
        return [results[number] for number in range(len(self.engines))]

    def effective_settings(self, timeout_s: float, phase: str) -> dict[str, Any]:
        """Waits until every engine is up; settings of the first (all are alike)."""
        calls = [engine.effective_settings.remote() for engine in self.engines]
        return wait_for(phase, self._crew.names, calls, timeout_s)[0]

    def replace_all(self) -> None:
        """Starts every engine afresh, with the weights of model.path; waits."""
        for number in range(len(self.engines)):
            self._crew.replace(number)
        self.effective_settings(self._start_timeout_s, "restart (limit: placement.start_timeout_s)")

    def _restart(self, number: int, failure: ActorError) -> None:
        """Puts a new engine with the current weights in the place of a lost one."""
        self._restart_empty(number, failure)
        update = self._current_weights()
        if update is not None:
            call = {number: lambda engine: engine.update_weights.remote(update)}
            self._crew.call("weight sync", call, self._timeout_s, self._restart_empty)

    def _restart_empty(self, number: int, failure: ActorError) -> None:
        if not self._replaceable:
            raise StateLost(str(failure), failure.cause) from failure
        self._crew.restart(number, failure, lambda engine: engine.effective_settings.remote(), self._start_timeout_s)


def _require_version(sent: int, reported: Sequence[int]) -> None:
    if set(reported) != {sent}:
        raise ActorError(f"weight sync: sent version {sent}, engines report {list(reported)}")


def _generate_call(requests: Sequence[RolloutRequest]) -> Call:
    return lambda engine: engine.generate.remote(requests)


def _request_load(request: RolloutRequest) -> int:
    """Tokens that a request may cost: its context once, its completions in full."""
    reference = request.reference
    return int(reference.anchors.max()) + request.num_samples * int(reference.max_new_tokens.sum())
