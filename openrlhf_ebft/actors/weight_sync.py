"""Brings the policy's weights to the rollout engines, through the object store or through vLLM's GPU backends."""

from __future__ import annotations

from typing import Literal

from openrlhf_ebft.actors.policy_trainer import PolicyTrainerGroup
from openrlhf_ebft.actors.rollout_engine import RolloutEngineGroup
from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.distributed.weight_sync import WeightUpdate

Transfer = Literal["object_store", "nccl", "ipc"]


def choose_transfer(config: RolloutConfig, *, with_gpus: bool, adapters_alone: bool = False) -> Transfer:
    """The way that rollout.weight_transfer names; `auto` is nccl between GPUs, else the object store.

    Adapters alone (`adapters_alone`) always go through the object store: they are small.
    """
    if config.engine == "transformers" or adapters_alone:
        return "object_store"
    if config.weight_transfer != "auto":
        return config.weight_transfer
    return "nccl" if with_gpus else "object_store"


class WeightSync:
    """Sends weights after optimizer steps. An update that failed changed no published version and can be repeated."""

    def __init__(
        self, trainer: PolicyTrainerGroup, rollout: RolloutEngineGroup, transfer: Transfer, *, keep: bool = False
    ) -> None:
        """With `keep` the last update stays in the object store: engines that fall behind the trainer can be
        filled again."""
        self._trainer = trainer
        self._rollout = rollout
        self._transfer = transfer
        self._keep = keep
        self._kept: WeightUpdate | None = None
        self._held: int | None = 0
        rollout.refill_from(self._current if transfer == "object_store" else None)

    @property
    def version(self) -> int | None:
        """Version of the weights that the engines hold; None when it is not one of the trainer's."""
        return self._held

    def connect(self) -> None:
        """Lets trainer and engines meet; once, after both are up."""
        if self._transfer != "object_store":
            self._trainer.connect_engines(self._rollout.engines, self._transfer)

    def push(self) -> int:
        """Updates every engine to the trainer's weights unless they hold them; returns the version; waits.

        Raises ActorError with the text of the engine or rank that failed.
        """
        version = self._trainer.version
        if self._held == version:
            return version
        if self._transfer == "object_store":
            update = self._trainer.export_update()
            self._rollout.update_weights(update)
            self._kept = update if self._keep else None
        else:
            self._trainer.send_weights()
            self._rollout.check_versions(version)
        self._held = version
        return version

    def forget(self) -> None:
        """The trainer's weights were exchanged without a step: the next push sends them, whatever their version."""
        self._held, self._kept = None, None

    def start_over(self) -> None:
        """After the trainer was started afresh: what the engines hold is no weights of its any more."""
        self._held, self._kept = None, None
        if self._transfer != "object_store":
            self._rollout.replace_all()
            self.connect()

    def _current(self) -> WeightUpdate | None:
        """The weights that the engines hold, for a new one among them; None while they are those of model.path."""
        if self._held in (None, 0):
            return None  # None: the next push fills all engines
        if self._held == self._trainer.version:
            return self._trainer.export_update()
        return self._kept
