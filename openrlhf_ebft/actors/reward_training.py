"""Reward training on several ranks, each a Ray actor with a DeepSpeed trainer."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from openrlhf_ebft.actors.placement import PlacementError
from openrlhf_ebft.actors.waiting import wait_for
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.rad.reward_checkpoint import RewardCheckpoints
from openrlhf_ebft.rad.reward_training import PrefixRewardTrainSpec, RewardStep

logger = logging.getLogger(__name__)


class RewardRank:
    """One rank; a thin shell around `DeepSpeedRewardTrainer`."""

    def address(self) -> tuple[str, int]:
        """This node's address and a free port on it, for rank 0 to meet the others."""
        with socket.socket() as server:
            server.bind(("", 0))
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def setup(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Set what torch.distributed reads."""
        host, port = address
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port)
        )

    def build(self, config: RewardConfig, spec: PrefixRewardTrainSpec, texts: list[str], labels: list[float]) -> None:
        """Load the model and start DeepSpeed."""
        from openrlhf_ebft.distributed.reward_trainer import DeepSpeedRewardTrainer

        self.trainer = DeepSpeedRewardTrainer(config.backbone, texts, labels, spec, config.training.zero_stage)

    def plan(self) -> tuple[int, str | None]:
        """Optimizer steps of the whole run, and what to warn the user of."""
        return self.trainer.total_steps, self.trainer.warning

    def train_step(self) -> RewardStep:
        """One optimizer step of all ranks."""
        return self.trainer.train_step()

    def save_checkpoint(self, folder: str) -> None:
        """Write this rank's part."""
        self.trainer.save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> int:
        """Go on from a checkpoint; returns its step."""
        return self.trainer.load_checkpoint(folder)

    def save(self, output_dir: str) -> None:
        """Write the reward model (rank 0)."""
        self.trainer.save(output_dir)


def train_on_ranks(
    config: RewardConfig,
    spec: PrefixRewardTrainSpec,
    train: tuple[list[str], list[float]],
    on_step: Callable[[RewardStep], None],
    checkpoints: RewardCheckpoints,
) -> None:
    """Train on `config.training.ranks` actors and save to `config.output_dir`; blocks until done.

    Checkpoints need a folder that all nodes share. Starts a local Ray when none is connected, and stops what it
    started. Each rank takes one CPU, and one GPU where the cluster has any.

    Raises:
        PlacementError: the cluster has too few CPUs, or some GPUs but not one for every rank.
        ActorError: a rank failed, died or did not answer within training.timeout_s.
    """
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False)
    ranks = config.training.ranks
    actors: list[ray.actor.ActorHandle] = []
    try:
        share = rank_share(ranks, ray.cluster_resources())
        actors += [ray.remote(RewardRank).options(**share).remote() for _ in range(ranks)]
        names = [f"reward training rank {rank}" for rank in range(ranks)]

        def on_all(phase: str, calls: list[ray.ObjectRef]) -> list[Any]:
            return wait_for(phase, names[: len(calls)], calls, config.training.timeout_s)

        (address,) = on_all("start", [actors[0].address.remote()])
        on_all("start", [actor.setup.remote(rank, ranks, address) for rank, actor in enumerate(actors)])
        texts, labels = (ray.put(part) for part in train)
        on_all("load model", [actor.build.remote(config, spec, texts, labels) for actor in actors])
        ((steps, warning),) = on_all("start", [actors[0].plan.remote()])
        if warning:
            logger.warning(warning)
        newest, done = checkpoints.newest(), 0
        if newest is not None:
            done = on_all("load checkpoint", [actor.load_checkpoint.remote(str(newest)) for actor in actors])[0]

        def save(folder: Path) -> None:
            on_all("save checkpoint", [actor.save_checkpoint.remote(str(folder)) for actor in actors])

        for step in range(done + 1, steps + 1):
            on_step(on_all("train", [actor.train_step.remote() for actor in actors])[0])
            if checkpoints.is_due(step, steps):
                checkpoints.write(step, save)
        on_all("save", [actor.save.remote(config.output_dir) for actor in actors])
    finally:
        for actor in actors:
            ray.kill(actor)
        if started:
            ray.shutdown()


def rank_share(ranks: int, cluster: Mapping[str, float]) -> dict[str, int]:
    """What each rank asks Ray for: a CPU, and a GPU where the cluster has any.

    Args:
        ranks: training.ranks.
        cluster: resources of the cluster by name ("CPU", "GPU").

    Raises:
        PlacementError: see `train_on_ranks`.
    """
    kinds = ("CPU", "GPU") if cluster.get("GPU", 0) else ("CPU",)
    for kind in kinds:
        count = int(cluster.get(kind, 0))
        if count < ranks:
            raise PlacementError(
                f"training.ranks = {ranks} needs as many {kind}s, the cluster has {count}: set it to at most {count}"
            )
    return {"num_cpus": 1, "num_gpus": len(kinds) - 1}
