"""Alignment, diversity and the reward of every rollout (EBFT, arXiv 2603.12248, eq. 7 and variant (i)).

Shape letters: B rows, P prompts, N rollouts of a prompt, D embedding size.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from openrlhf_ebft.core.feature_matching import cfm_loss, cfm_loss_unbiased
from openrlhf_ebft.core.gram import (
    check_gram,
    check_groups,
    group_gram,
    require_floating,
    scaled_to_one,
    siblings_mean,
    unit_gram,
    unit_rows,
)
from openrlhf_ebft.core.whitening import whitened_products

Whitening = Literal["feature", "sample", "none"]


@dataclass(frozen=True, eq=False)
class GroupRewards:
    """Rewards of groups, float64. ``alignment`` and ``diversity`` are before the factor 2 and the coefficients."""

    alignment: Tensor  # (..., N) cosine with the ground truth, in [-1, 1]
    diversity: Tensor  # (..., N) mean product with the other rollouts
    reward: Tensor  # (..., N) 2 * alignment_coef * alignment - 2 * diversity_coef * diversity, + the next two's product
    raw_alignment: Tensor  # (..., N) cosine before whitening
    cfm: Tensor  # (...) feature-matching loss of unit-length embeddings
    cfm_unbiased: Tensor  # (...) the same without bias; NaN when N = 1
    alignment_coef: float
    diversity_coef: float
    function: Tensor | None = None  # (..., N) values of a reward function of the user's
    function_coef: float = 0.0


def add_function_values(rewards: GroupRewards, values: Tensor, coef: float) -> GroupRewards:
    """The rewards with `coef` times a reward function's values on top.

    Args:
        rewards: without a function.
        values: (..., N), one for each rollout, finite.
        coef: their weight.

    Raises:
        ValueError: another shape, or values that are not finite.
    """
    if values.shape != rewards.reward.shape or not bool(values.isfinite().all()):
        raise ValueError(f"need {tuple(rewards.reward.shape)} finite values, got {tuple(values.shape)}: {values}")
    values = values.to(rewards.reward)
    return replace(rewards, reward=rewards.reward + coef * values, function=values, function_coef=coef)


def compute_rewards(
    gram: Tensor,
    *,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    whitening: Whitening = "feature",
    whiten_tol: float = 1e-5,
) -> GroupRewards:
    """Rewards and feature-matching losses of all groups, from their inner products.

    Args:
        gram: (..., N+1, N+1) raw inner products of pooled embeddings, the ground truth last (`group_gram`).
        alignment_coef, diversity_coef: weights of the two terms.
        whitening: "feature", "sample" (the authors' code) or "none" (embeddings scaled to unit length).
        whiten_tol: relative singular-value cut of the whitening, 1e-6 or more.
    Returns:
        `GroupRewards`; all-zero embeddings have alignment and diversity 0.
    Raises:
        ValueError: a bad shape or option, or a non-finite group (named).
    """
    check_gram(gram)
    gram = gram.detach().double()
    cosines = unit_gram(gram)
    raw_alignment = cosines[..., -1, :-1]
    if whitening == "none":
        alignment, generated = raw_alignment, cosines[..., :-1, :-1]
    elif whitening in ("feature", "sample"):
        generated, cross, truth = whitened_products(gram, space=whitening, whiten_tol=whiten_tol)
        squared = generated.diagonal(dim1=-2, dim2=-1).clamp_min(0) * truth
        alignment = torch.where(squared > 0, cross / squared.sqrt(), 0.0).clamp(-1, 1)
    else:
        raise ValueError(f'whitening must be "feature", "sample" or "none", got {whitening!r}')
    diversity = siblings_mean(generated)
    return GroupRewards(
        alignment=alignment,
        diversity=diversity,
        reward=2 * alignment_coef * alignment - 2 * diversity_coef * diversity,
        raw_alignment=raw_alignment,
        cfm=cfm_loss(gram),
        cfm_unbiased=cfm_loss_unbiased(gram),
        alignment_coef=alignment_coef,
        diversity_coef=diversity_coef,
    )


def compute_rewards_from_embeddings(
    phi: Tensor,
    phi_gt: Tensor,
    *,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    whitening: Whitening = "feature",
    whiten_tol: float = 1e-5,
) -> GroupRewards:
    """`compute_rewards` of pooled embeddings phi (..., N, D) and phi_gt (..., D), any floating dtype."""
    check_groups(phi, phi_gt)
    rows, _ = scaled_to_one(phi.detach())  # no reward depends on the size of a group or of its ground truth
    truth, _ = scaled_to_one(phi_gt.detach().unsqueeze(-2))
    return compute_rewards(
        group_gram(rows, truth.squeeze(-2)),
        alignment_coef=alignment_coef,
        diversity_coef=diversity_coef,
        whitening=whitening,
        whiten_tol=whiten_tol,
    )


@torch.no_grad()
def get_alignment_rewards(gen_embedding: Tensor, gt_embedding: Tensor) -> Tensor:
    """Cosine of each generated embedding with its ground truth.

    Args:
        gen_embedding: (B, D), or (..., N, D).
        gt_embedding: the same shape; with leading axes also (..., 1, D), one ground truth per group.
    Returns:
        (B,) or (..., N) in [-1, 1], dtype of ``gen_embedding``; 0 where an embedding is all zero.
    Raises:
        ValueError: shapes that do not fit, or dtypes that are not floating.
    """
    require_floating("gen_embedding", gen_embedding)
    require_floating("gt_embedding", gt_embedding)
    shape = gen_embedding.shape
    one_per_group = gen_embedding.ndim > 2 and gt_embedding.shape == (*shape[:-2], 1, shape[-1])
    if gen_embedding.ndim < 2 or not (gt_embedding.shape == shape or one_per_group):
        raise ValueError(
            f"gen_embedding and gt_embedding must both be (B, D), or (..., N, D) with (..., 1, D); "
            f"got {tuple(shape)} and {tuple(gt_embedding.shape)}"
        )
    cosine = (unit_rows(gen_embedding) * unit_rows(gt_embedding)).sum(-1)
    return cosine.clamp_(-1, 1).to(gen_embedding.dtype)


@torch.no_grad()
def get_diversity_rewards(gen_embedding: Tensor, num_generations: int) -> Tensor:
    """Mean dot product of each generated embedding with its siblings (the other rollouts of its prompt).

    Args:
        gen_embedding: (B, D) with B = prompts * num_generations, siblings consecutive; or (..., num_generations, D).
        num_generations: rollouts per prompt; with 1 there are no siblings and the value is 0.
    Returns:
        (B,) or (..., num_generations), dtype of the input.
    Raises:
        ValueError: B not a multiple of num_generations, or another number of rollouts per group.
    """
    require_floating("gen_embedding", gen_embedding)
    shape = gen_embedding.shape
    if gen_embedding.ndim < 2 or num_generations < 1:
        raise ValueError(f"need (B, D) and num_generations >= 1, got {tuple(shape)} and {num_generations}")
    if gen_embedding.ndim == 2 and shape[0] % num_generations:
        raise ValueError(f"gen_embedding has {shape[0]} rows, not a multiple of num_generations = {num_generations}")
    if gen_embedding.ndim > 2 and shape[-2] != num_generations:
        raise ValueError(f"gen_embedding has {shape[-2]} rollouts per group, num_generations is {num_generations}")
    wide = gen_embedding if gen_embedding.dtype == torch.float64 else gen_embedding.float()
    groups = wide.reshape(-1, num_generations, shape[-1])
    return siblings_mean(groups @ groups.mT).reshape(shape[:-1]).to(gen_embedding.dtype)
