"""Actors of one role that can be lost: each is started again in its place, within the run's budget of restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from openrlhf_ebft.actors.pulse import Pulse
from openrlhf_ebft.actors.waiting import ActorError, ActorGone, StateLost, outcomes
from openrlhf_ebft.config.durability import RecoveryConfig

_DEATH_SHOWS_S = 5.0  # a broken connection may be seen before the death of the process behind it

Call = Callable[[Any], ObjectRef]
"""Makes a remote call on the actor that it is given."""


class RestartsSpent(ActorError):
    """An actor is lost and the budget of restarts is used up."""


@dataclass(frozen=True)
class Restart:
    """One restart, as it is remembered and reported."""

    at: float  # monotonic clock, in seconds
    furthest: int  # steps that the run had completed at most
    reason: str


class RestartBudget:
    """Counts the restarts of a whole run and waits longer before each.

    A restart counts while it is younger than `recovery.window_s`, and for as long as the run has not got further than
    it was then: a failure that comes back at the same step ends the run however slowly it comes.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._furthest = 0
        self.restarts: list[Restart] = []  # all of the run

    def reached(self, step: int) -> None:
        """Notes that `step` steps are completed."""
        self._furthest = max(self._furthest, step)

    def spend(self, failure: ActorError) -> None:
        """Allows one restart after the back-off.

        Raises RestartsSpent, with the failure's own text, when the budget is used up.
        """
        config = self._config
        now = self._clock()
        counted = sum(now - r.at < config.window_s or r.furthest == self._furthest for r in self.restarts)
        if config.max_restarts == 0:
            raise RestartsSpent(f"{failure}; recovery.max_restarts = 0 allows no restart", failure.cause) from failure
        if counted >= config.max_restarts:
            raise RestartsSpent(
                f"{failure}; {counted} restarts within recovery.window_s = {config.window_s:g} s or without a new "
                f"step are all that recovery.max_restarts = {config.max_restarts} allows",
                failure.cause,
            ) from failure
        self.restarts.append(Restart(now, self._furthest, str(failure)))
        pause = min(config.backoff_s * 2**counted, config.max_backoff_s)
        self._say(f"recovery: {failure}; restart {counted + 1} of {config.max_restarts} in {pause:g} s")
        self._sleep(pause)

    def say(self, text: str) -> None:
        """Reports how a restart went."""
        self._say(f"recovery: {text}")


class Crew:
    """The actors of one role, by number. A lost one is replaced by a new one in the same place."""

    def __init__(
        self, names: Sequence[str], spawn: Callable[[int], Any], budget: RestartBudget, heartbeat_s: float
    ) -> None:
        """Starts one actor for each name, side by side.

        Args:
            names: what the actors are called in messages.
            spawn: starts the actor of a number and returns its handle at once.
            budget: of the whole run.
            heartbeat_s: silence after which an actor counts as lost, in seconds.
        """
        self.names = list(names)
        self.budget = budget
        self._spawn = spawn
        self._limit_s = heartbeat_s
        self.handles = [spawn(number) for number in range(len(names))]
        self.pulses = [Pulse(handle, self._limit_s) for handle in self.handles]

    def __len__(self) -> int:
        return len(self.handles)

    def attempt(
        self, phase: str, calls: Mapping[int, Call], timeout_s: float, *, watched: bool = True
    ) -> tuple[dict[int, Any], dict[int, ActorError]]:
        """Makes the calls, by number of the actor, and waits for every one; returns (results, failures).

        Without `watched` the limit alone counts, and no sign of life is asked for: a process that starts may give none
        while it loads libraries.
        """
        numbers = list(calls)
        references = [calls[number](self.handles[number]) for number in numbers]
        results: dict[int, Any] = {}
        failures: dict[int, ActorError] = {}
        names = [self.names[number] for number in numbers]
        pulses = [self.pulses[number] for number in numbers] if watched else []
        for index, outcome in outcomes(phase, names, references, timeout_s, pulses):
            target = failures if isinstance(outcome, ActorError) else results
            target[numbers[index]] = outcome
        return results, failures

    def call(
        self,
        phase: str,
        calls: Mapping[int, Call],
        timeout_s: float,
        restart: Callable[[int, ActorError], None],
    ) -> dict[int, Any]:
        """Results by number. A lost actor is replaced through `restart` and its call alone is made again.

        Raises ActorError when an actor fails without being lost, and what `restart` raises.
        """
        results: dict[int, Any] = {}
        todo = dict(calls)
        while todo:
            came, failures = self.attempt(phase, todo, timeout_s)
            results |= came
            for failure in failures.values():
                if not failure.is_loss:
                    raise failure
            for number, failure in failures.items():
                restart(number, failure)
            todo = {number: todo[number] for number in failures}
        return results

    def replace(self, number: int) -> None:
        """Ends what is left of an actor and starts another in its place; returns before it is up."""
        ray.kill(self.handles[number])
        self.handles[number] = self._spawn(number)
        self.pulses[number] = Pulse(self.handles[number], self._limit_s)

    def restart(self, number: int, failure: ActorError, ready: Call, timeout_s: float) -> None:
        """Replaces a lost actor and waits until `ready` is answered; one that is lost on its way is replaced, too.

        Raises RestartsSpent when the budget is used up, ActorError when the new actor cannot start.
        """
        start = time.monotonic()
        while True:
            self.budget.spend(failure)
            self.replace(number)
            phase = "restart (limit: placement.start_timeout_s)"
            _, failures = self.attempt(phase, {number: ready}, timeout_s, watched=False)
            if number not in failures:
                break
            failure = failures[number]
            if not failure.is_loss:
                raise failure
        self.budget.say(f"{self.names[number]} is back after {time.monotonic() - start:.1f} s")

    def loss_behind(self, failure: ActorError) -> ActorError:
        """The failure of actors that work together, told by its cause: `StateLost` when one of them is lost.

        An actor whose peer has died may fail first, with a broken connection; so the others are looked at, too.
        """
        if failure.is_loss:
            return StateLost(str(failure), failure.cause)
        if isinstance(failure.cause, ValueError):
            return failure
        probes = [handle.__ray_ready__.remote() for handle in self.handles]
        for number, outcome in outcomes("probe", self.names, probes, _DEATH_SHOWS_S):
            if isinstance(outcome, ActorGone):
                return StateLost(f"{self.names[number]} is gone; {failure}", failure.cause)
        return failure
