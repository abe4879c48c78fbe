"""What a training step's rewards come to: per sample, per group and over the whole step."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.rewards import GroupRewards

GroupId = Hashable
"""Names a group, for example (example id, anchor number)."""

GroupProducts = list[tuple[str, Tensor]]
"""(example id, (A, n+1, n+1) inner products) of each tree: all that leaves a feature network."""

# An advantage below this moves nothing; rounding of equal completions' features in different batches stays below it.
ZERO_ADVANTAGE = 1e-6


@dataclass(frozen=True)
class MissingSamples:
    """How many of a group's samples came."""

    expected: int
    received: int


@dataclass(frozen=True)
class StepStatistics:
    """Exact means over all samples (or groups) of a step, not means of means."""

    alignment: float  # over samples, before the factor 2 and the coefficient
    diversity: float  # over samples, likewise
    reward_mean: float  # over samples
    reward_std: float  # over samples, divisor samples - 1; 0 for one sample
    raw_alignment: float  # over samples: cosine before whitening
    cfm: float  # over groups
    cfm_unbiased: float | None  # over groups with two or more samples; None if there is none
    zero_advantage_share: float  # share of groups in which no sample has an advantage
    num_groups: int
    num_samples: int
    function: float | None = None  # over samples: mean value of the user's reward function; None without one


@dataclass(frozen=True)
class GroupValues:
    """One group's means over its samples, for paired comparisons."""

    alignment: float
    diversity: float
    reward: float
    raw_alignment: float
    cfm: float
    cfm_unbiased: float | None  # None for a group of one sample
    function: float | None = None  # mean value of the user's reward function; None without one


@dataclass(frozen=True, eq=False)
class StepRewards:
    """Result of a step; incomplete groups are in ``missing`` and nowhere else."""

    groups: dict[GroupId, GroupValues]
    advantages: dict[GroupId, Tensor]  # (n,) float32 per group
    rewards: dict[GroupId, Tensor]  # (n,) float32 per group
    statistics: StepStatistics
    missing: dict[GroupId, MissingSamples]


def group_values(rewards: GroupRewards) -> list[GroupValues]:
    """One entry per group of rewards (groups, n)."""
    means = [getattr(rewards, name).mean(-1).tolist() for name in ("alignment", "diversity", "reward", "raw_alignment")]
    unbiased = [value if math.isfinite(value) else None for value in rewards.cfm_unbiased.tolist()]
    function = [None] * len(unbiased) if rewards.function is None else rewards.function.mean(-1).tolist()
    return [GroupValues(*row) for row in zip(*means, rewards.cfm.tolist(), unbiased, function, strict=True)]


def step_statistics(batches: Sequence[tuple[GroupRewards, Tensor]]) -> StepStatistics:
    """Statistics of batches of groups, each (groups, n) with its own n."""

    def gather(field: str) -> Tensor:
        return torch.cat([getattr(rewards, field).flatten() for rewards, _ in batches])

    reward, unbiased = gather("reward"), gather("cfm_unbiased")
    unbiased = unbiased[unbiased.isfinite()]
    idle = torch.cat([(advantages.abs() <= ZERO_ADVANTAGE).all(-1) for _, advantages in batches])
    return StepStatistics(
        alignment=gather("alignment").mean().item(),
        diversity=gather("diversity").mean().item(),
        reward_mean=reward.mean().item(),
        reward_std=reward.std().item() if len(reward) > 1 else 0.0,
        raw_alignment=gather("raw_alignment").mean().item(),
        cfm=gather("cfm").mean().item(),
        cfm_unbiased=unbiased.mean().item() if len(unbiased) else None,
        zero_advantage_share=idle.double().mean().item(),
        num_groups=len(idle),
        num_samples=len(reward),
        function=gather("function").mean().item() if batches[0][0].function is not None else None,
    )
