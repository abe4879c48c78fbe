"""Advantage estimators: one short function each, one line in a table (algorithms.md section 6).

All work along the last axis, the n rollouts of one group. A sample whose reward is not finite gets advantage 0 and
enters no baseline; a group with fewer than two finite rewards has no baseline and gets 0 (except `reinforce`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_ebft.core.rewards import GroupRewards


@dataclass(frozen=True, eq=False)
class _Terms:
    """Rewards split into the part of the sample alone and the part of its siblings; zeros where not finite."""

    own: Tensor  # (..., n) alignment_coef * 2 * alignment + function_coef * function
    shared: Tensor  # (..., n) diversity_coef * 2 * diversity
    finite: Tensor  # (..., n) bool

    @property
    def reward(self) -> Tensor:
        return self.own - self.shared

    @property
    def count(self) -> Tensor:
        """(..., 1) number of finite samples."""
        return self.finite.sum(-1, keepdim=True)


def _leave_one_out(values: Tensor, weight: float, count: Tensor) -> Tensor:
    """(sum_i v_i - weight * v_j) / (count - weight), 0 where the divisor is not positive."""
    divisor = count - weight
    total = values.sum(-1, keepdim=True) - weight * values
    return torch.where(divisor > 0, total / divisor.clamp_min(1), 0.0)


def _rloo(terms: _Terms) -> Tensor:
    # A sibling's diversity contains its product with sample j, and so does j's own: subtracting 2 V_j removes both,
    # which makes the baseline independent of j. rloo_simple leaves that product in.
    baseline = _leave_one_out(terms.own, 1, terms.count) - _leave_one_out(terms.shared, 2, terms.count)
    return torch.where(terms.count > 1, terms.reward - baseline, 0.0)


def _rloo_simple(terms: _Terms) -> Tensor:
    baseline = _leave_one_out(terms.reward, 1, terms.count)
    return torch.where(terms.count > 1, terms.reward - baseline, 0.0)


def _dr_grpo(terms: _Terms) -> Tensor:
    return terms.reward - terms.reward.sum(-1, keepdim=True) / terms.count.clamp_min(1)


def _group_norm(terms: _Terms) -> Tensor:
    # Measured from one of them, equal rewards deviate by exactly 0; the rounding of a mean, divided by so small a
    # deviation, could be any number.
    first = terms.reward.gather(-1, terms.finite.int().argmax(-1, keepdim=True))
    offset = torch.where(terms.finite, terms.reward - first, 0.0)
    mean = offset.sum(-1, keepdim=True) / terms.count.clamp_min(1)
    centred = torch.where(terms.finite, offset - mean, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / (terms.count - 1).clamp_min(1)
    return centred / (variance.sqrt() + 1e-8)


def _reinforce(terms: _Terms) -> Tensor:
    return terms.reward


ESTIMATORS: dict[str, Callable[[_Terms], Tensor]] = {
    "rloo": _rloo,
    "rloo_simple": _rloo_simple,
    "group_norm": _group_norm,
    "dr_grpo": _dr_grpo,
    "reinforce": _reinforce,
}


def check_estimator(estimator: str, num_samples: int) -> None:
    """Raise ValueError for an unknown estimator, no samples, or one sample where siblings are needed."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}, known: {', '.join(ESTIMATORS)}")
    if num_samples < 1:
        raise ValueError(f"a group needs at least 1 sample, got {num_samples}")
    if num_samples == 1 and estimator != "reinforce":
        raise ValueError(f"estimator {estimator!r} needs n >= 2 rollouts per group, got n = 1: use 'reinforce'")


@torch.no_grad()
def compute_advantages(rewards: GroupRewards | Tensor, estimator: str = "rloo") -> Tensor:
    """Advantage of every rollout in its group.

    Args:
        rewards: a `GroupRewards`, or plain rewards (..., n) that do not depend on the siblings.
        estimator: a key of `ESTIMATORS`. `rloo` leaves sample j out of the alignment and of the diversity baseline;
            `rloo_simple` is the mean of the others' rewards; `group_norm` divides by (std + 1e-8), std with n - 1;
            `dr_grpo` subtracts the mean; `reinforce` keeps the reward.
    Returns:
        (..., n) in the rewards' dtype, computed in float64; finite, 0 for samples without a finite reward. The
        diversity of the finite samples of such a group must come from its finite samples alone.
    Raises:
        ValueError: unknown estimator, no samples, or n = 1 with an estimator that needs siblings.
    """
    reward = rewards if isinstance(rewards, Tensor) else rewards.reward
    if not reward.is_floating_point() or reward.ndim < 1:
        raise ValueError(f"rewards must be floating (..., n), got {reward.dtype} {tuple(reward.shape)}")
    check_estimator(estimator, reward.shape[-1])
    finite = reward.isfinite()
    if isinstance(rewards, Tensor):
        own, shared = reward.double(), torch.zeros_like(reward, dtype=torch.float64)
    else:
        own = 2 * rewards.alignment_coef * rewards.alignment.double()
        if rewards.function is not None:
            own = own + rewards.function_coef * rewards.function.double()
        shared = 2 * rewards.diversity_coef * rewards.diversity.double()
    terms = _Terms(torch.where(finite, own, 0.0), torch.where(finite, shared, 0.0), finite)
    return torch.where(finite, ESTIMATORS[estimator](terms), 0.0).to(reward.dtype)
