"""Brings the policy's weights to the rollout engines, through the object store or through vLLM's GPU backends."""

from __future__ import annotations

from typing import Literal

from openrlhf_ebft.actors.policy_trainer import PolicyTrainerGroup
from openrlhf_ebft.actors.rollout_engine import RolloutEngineGroup
from openrlhf_ebft.config.sections import RolloutConfig

Transfer = Literal["object_store", "nccl", "ipc"]


def choose_transfer(config: RolloutConfig, *, with_gpus: bool) -> Transfer:
    """The way that rollout.weight_transfer names; `auto` is nccl between GPUs, else the object store."""
    if config.engine == "transformers":
        return "object_store"
    if config.weight_transfer != "auto":
        return config.weight_transfer
    return "nccl" if with_gpus else "object_store"


class WeightSync:
    """Sends weights after optimizer steps. An update that failed changed no published version and can be repeated."""

    def __init__(self, trainer: PolicyTrainerGroup, rollout: RolloutEngineGroup, transfer: Transfer) -> None:
        self._trainer = trainer
        self._rollout = rollout
        self._transfer = transfer
        self.version = 0  # weights that the engines hold

    def connect(self) -> None:
        """Lets trainer and engines meet; once, after both are up."""
        if self._transfer != "object_store":
            self._trainer.connect_engines(self._rollout.engines, self._transfer)

    def push(self) -> int:
        """Updates every engine to the trainer's weights unless they hold them; returns the version; waits.

        Raises ActorError with the text of the engine or rank that failed.
        """
        if self.version == self._trainer.version:
            return self.version
        if self._transfer == "object_store":
            self._rollout.update_weights(self._trainer.export_update())
        else:
            self._trainer.send_weights()
            self._rollout.check_versions(self._trainer.version)
        self.version = self._trainer.version
        return self.version
