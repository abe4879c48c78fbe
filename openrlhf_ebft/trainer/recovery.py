"""Carries a run through the loss of trainer ranks: back to the newest complete checkpoint, and on from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from openrlhf_ebft.actors.waiting import StateLost
from openrlhf_ebft.trainer.checkpoints import Checkpoint, CheckpointStore
from openrlhf_ebft.trainer.ebft_trainer import EBFTTrainer

Result = TypeVar("Result")


def carried_through(trainer: EBFTTrainer, store: CheckpointStore, work: Callable[[], Result]) -> Result:
    """Calls `work`, which goes on from `trainer.state`, until it ends without losing a trainer rank.

    Raises what `work` raises, and ActorError when the trainer may not or cannot be started again.
    """
    while True:
        try:
            return work()
        except StateLost as failure:
            _go_back(trainer, store, failure)


def _go_back(trainer: EBFTTrainer, store: CheckpointStore, failure: StateLost) -> None:
    """Starts the trainer group afresh and puts the run back to its newest complete checkpoint, or to its beginning."""
    budget, lost_at = trainer.actors.budget, trainer.state.step
    store.abandon()
    checkpoint = _checkpoint_to_go_on_from(trainer, store, failure)
    start = time.monotonic()
    while True:
        budget.spend(failure)
        try:
            trainer.actors.restart_trainer()
            if checkpoint is None:
                trainer.begin()
            else:
                trainer.resume(checkpoint)
            break
        except StateLost as again:
            failure = again
    trainer.rewind_records()
    seconds, redone = time.monotonic() - start, lost_at - trainer.state.step
    budget.say(f"the trainer is back after {seconds:.1f} s; {redone} completed steps are done again")


def _checkpoint_to_go_on_from(trainer: EBFTTrainer, store: CheckpointStore, failure: StateLost) -> Checkpoint | None:
    checkpoint = store.newest()
    if checkpoint is None and trainer.config.recovery.without_checkpoint == "stop":
        raise StateLost(
            f"{failure}; there is no checkpoint to go on from (checkpoint.every_steps), and "
            "recovery.without_checkpoint = stop",
            failure.cause,
        ) from failure
    return checkpoint
