"""Configuration and batches that the ranks of the trainer tests and their plain re-derivation share."""

from __future__ import annotations

from pathlib import Path

import torch

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.step_batch import TrainItem, deal_passes
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.trees import make_reference, make_tree

STEPS = 3
SHAPES = (
    (9, [4], [[3, 6]]),
    (14, [7], [[2, 4]]),
    (6, [3], [[1, 5]]),
    (12, [5, 8], [[4, 2], [3, 3]]),
)


def make_config(
    model: Path,
    *,
    zero_stage: int = 0,
    offload_optimizer: bool = False,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    num_ranks: int = 1,
) -> EBFTConfig:
    return EBFTConfig(
        name="test",
        model={"path": str(model), "dtype": dtype},
        data={"path": "unused"},
        rollout={"temperature": 0.7},
        policy={
            "prompts_per_step": len(SHAPES),
            "micro_batch_size": micro_batch_size,
            "max_tokens_per_micro_batch": max_tokens,
            "num_ranks": num_ranks,
            "ce_coef": 0.1,
            "entropy_coef": 0.01,
            "gradient_checkpointing": gradient_checkpointing,
            "logprob_chunk_tokens": 7,
        },
        optimizer={
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "schedule": "linear",
            "warmup_steps": 1,
        },
        deepspeed={"zero_stage": zero_stage, "offload_optimizer": offload_optimizer},
    )


def rank_passes(items: list[TrainItem], trainer: PolicyTrainer) -> list[list[TrainItem]]:
    """What the trainer's group would give to this rank."""
    policy, sizes = trainer.config.policy, [len(item.tree) for item in items]
    dealt = deal_passes(
        sizes,
        trainer.world_size,
        micro_batch_size=policy.micro_batch_size,
        max_tokens=policy.max_tokens_per_micro_batch,
    )
    return [[items[i] for i in numbers] for numbers in dealt[trainer.rank]]


def step_items(step: int) -> list[TrainItem]:
    """The trees of one step; the last step has one tree fewer, as the last batch of an epoch may."""
    generator = torch.Generator().manual_seed(step)
    items = []
    for number, (size, anchors, lengths) in enumerate(SHAPES[: len(SHAPES) - (step == STEPS - 1)]):
        seed = 10 * step + number
        tree = make_tree(make_reference(size, anchors, seed=seed), lengths, seed=seed + 1)
        items.append(TrainItem(tree, torch.randn(tree.branch_lengths.shape, generator=generator)))
    return items
