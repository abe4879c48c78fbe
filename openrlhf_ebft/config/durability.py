"""Sections about runs that last: checkpoints, and what happens when a process is lost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from openrlhf_ebft.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints of the trainer and the exported model."""

    every_steps: int = Field(0, ge=0, description="optimizer steps between checkpoints; 0: none")
    background: bool = Field(
        False, description="write checkpoints while training goes on, from copies that take host memory meanwhile"
    )
    keep_last: int = Field(2, ge=1, description="newest complete checkpoints that are kept")
    keep_best: int = Field(
        0, ge=0, description="best checkpoints that are kept besides; one is saved after each evaluation that is better"
    )
    best_metric: Literal["ce", "alignment", "diversity", "reward", "cfm", "cfm_unbiased"] = Field(
        "ce", description="held-out value that decides which checkpoints are best"
    )
    best_direction: Literal["lower", "higher"] = Field("lower", description="which values of best_metric are better")
    on_interrupt: bool = Field(False, description="save a checkpoint on Ctrl-C or SIGTERM")
    on_full_disk: Literal["error", "warn"] = Field(
        "error",
        description="a checkpoint without room: the run ends, or goes on without it (one rank only)",
    )


class RecoveryConfig(Section):
    """Lost actors: rollout engines, feature networks and the aggregator are started again and asked again; a lost
    trainer rank sends the trainer back to the newest complete checkpoint."""

    max_restarts: int = Field(
        5,
        ge=0,
        description="restarts within recovery.window_s, or without a new step, before the run ends; 0: none at all",
    )
    window_s: float = Field(3600.0, gt=0.0, description="time over which restarts are counted, in seconds")
    backoff_s: float = Field(1.0, ge=0.0, description="wait before a restart, doubled with each, in seconds")
    max_backoff_s: float = Field(60.0, ge=0.0, description="longest wait before a restart, in seconds")
    heartbeat_s: float = Field(
        60.0, ge=1.0, description="an actor whose process gives no sign of life for so long counts as lost, in seconds"
    )
    without_checkpoint: Literal["restart", "stop"] = Field(
        "restart",
        description="a trainer rank lost before the first checkpoint: begin again from the first step, or end the run",
    )
