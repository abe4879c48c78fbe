"""The conditional feature-matching loss of a group, plain and unbiased.

On embeddings scaled to unit length, so that runs with and without whitening compare (algorithms.md section 6).
"""

import torch
from torch import Tensor

from openrlhf_ebft.core.gram import check_gram, siblings_mean, unit_gram


def cfm_loss(gram: Tensor) -> Tensor:
    """||mean_j phi_j - phi_gt||^2 on unit-length embeddings.

    Biased upwards as an estimate of ||E phi - phi_gt||^2: by the variance of phi over N.

    Args:
        gram: (..., N+1, N+1) raw inner products, the ground truth last.
    Returns:
        (...) float64.
    """
    check_gram(gram)
    cosines = unit_gram(gram)
    generated, cross, truth = cosines[..., :-1, :-1], cosines[..., -1, :-1], cosines[..., -1, -1]
    return (generated.mean((-2, -1)) - 2 * cross.mean(-1) + truth).clamp_min(0)


def cfm_loss_unbiased(gram: Tensor) -> Tensor:
    """||gt||^2 - 2 mean_j <phi_j, gt> + mean_{i != j} <phi_i, phi_j> on unit-length embeddings; may be negative.

    Args:
        gram: (..., N+1, N+1) raw inner products, the ground truth last.
    Returns:
        (...) float64; NaN when N = 1, where no unbiased form exists.
    """
    check_gram(gram)
    cosines = unit_gram(gram)
    generated, cross, truth = cosines[..., :-1, :-1], cosines[..., -1, :-1], cosines[..., -1, -1]
    if generated.shape[-1] == 1:
        return torch.full_like(truth, torch.nan)
    return siblings_mean(generated).mean(-1) - 2 * cross.mean(-1) + truth
