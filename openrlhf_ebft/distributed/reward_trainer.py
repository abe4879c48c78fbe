"""Reward training with DeepSpeed: one rank of it, as a plain class that runs with or without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from openrlhf_ebft.distributed.device import local_device
from openrlhf_ebft.distributed.process_group import join_ranks
from openrlhf_ebft.rad.reward_checkpoint import RankLayout, read_rank_state, write_rank_state
from openrlhf_ebft.rad.reward_examples import RewardExamples
from openrlhf_ebft.rad.reward_loss import prefix_rewards
from openrlhf_ebft.rad.reward_training import (
    PrefixRewardTrainSpec,
    RewardTrainer,
    build_reward_model,
    save_reward_model,
)

_ENGINE, _TAG = "deepspeed", "engine"  # folder and name of DeepSpeed's part of a checkpoint


class _PrefixRewards(nn.Module):
    """The reward model behind DeepSpeed's engine: ids and mask [B, T] to rewards [B, T]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return prefix_rewards(self.model, input_ids, attention_mask)


class DeepSpeedRewardTrainer(RewardTrainer):
    """A rank's share of reward training. Collective: every rank makes the same calls in the same order.

    The ranks together take the same optimizer steps as one process with the same settings.

    Args:
        backbone, texts, labels, spec: as in `train_prefix_reward_model`.
        zero_stage: 0, 1 or 2 (weights stay whole on every rank).

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set.
    """

    def __init__(
        self,
        backbone: str,
        texts: list[str],
        labels: list[float],
        spec: PrefixRewardTrainSpec,
        zero_stage: int,
    ) -> None:
        device = local_device()
        join_ranks(device)
        self.zero_stage = zero_stage
        model, self.tokenizer = build_reward_model(backbone, spec.seed)
        examples = RewardExamples(self.tokenizer, texts, labels, spec.max_length)
        super().__init__(model.to(device), examples, spec, dist.get_rank(), dist.get_world_size())

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        self.engine, _, _, _ = deepspeed.initialize(
            model=_PrefixRewards(self.model),
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            config=settings,
            dist_init_required=False,
        )

    def _predict(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.engine(input_ids, attention_mask)

    def _mean_over_ranks(self, loss: torch.Tensor) -> float:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / self.world_size

    def _apply(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        self.engine.step()

    def save_checkpoint(self, folder: str | Path) -> None:
        """Every rank writes its part into an existing folder; collective."""
        self.engine.save_checkpoint(str(Path(folder) / _ENGINE), tag=_TAG)
        write_rank_state(Path(folder), self.rank, self._layout(), self.progress())

    def load_checkpoint(self, folder: str | Path) -> int:
        """Go on from a checkpoint of `save_checkpoint`; collective. Returns the step that it was written after.

        Raises:
            ValueError: other settings, other data, or another number of ranks.
            RuntimeError: DeepSpeed's part is missing.
        """
        self.load_progress(read_rank_state(Path(folder), self.rank, self._layout()))
        path, _ = self.engine.load_checkpoint(str(Path(folder) / _ENGINE), tag=_TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        return self.step

    def _layout(self) -> RankLayout:
        return RankLayout(self.world_size, self.zero_stage)

    def save(self, output_dir: str | Path) -> None:
        """Rank 0 writes weights, configuration and tokenizer; the others wait."""
        if self.rank == 0:
            save_reward_model(self.model, self.tokenizer, output_dir)
        dist.barrier()
