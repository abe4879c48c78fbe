"""The feature-matching loss against its definition, and its unbiased form against the expectation."""

import itertools

import pytest
import torch

from openrlhf_ebft.core.feature_matching import cfm_loss, cfm_loss_unbiased
from openrlhf_ebft.core.gram import group_gram


def test_equals_the_definition_on_unit_embeddings():
    torch.manual_seed(0)
    phi, gt = torch.randn(2, 3, 4, 10, dtype=torch.float64) * 7, torch.randn(2, 3, 10, dtype=torch.float64)
    unit, unit_gt = (torch.nn.functional.normalize(rows, dim=-1) for rows in (phi, gt))
    right = (unit.mean(-2) - unit_gt).square().sum(-1)
    torch.testing.assert_close(cfm_loss(group_gram(phi, gt)), right)
    pairs = torch.stack([(unit[..., i, :] * unit[..., j, :]).sum(-1) for i in range(4) for j in range(4) if i != j])
    cross = (unit * unit_gt.unsqueeze(-2)).sum(-1).mean(-1)
    torch.testing.assert_close(cfm_loss_unbiased(group_gram(phi, gt)), 1 - 2 * cross + pairs.mean(0))


@pytest.mark.parametrize("n", [2, 3])
def test_expectation_over_all_groups(n):
    """Five equally likely completions: the unbiased form averages to the loss of the mean, the plain one does not."""
    torch.manual_seed(1)
    features = torch.nn.functional.normalize(torch.randn(5, 6, dtype=torch.float64), dim=-1)
    gt = torch.nn.functional.normalize(torch.randn(6, dtype=torch.float64), dim=-1)
    groups = features[torch.tensor(list(itertools.product(range(5), repeat=n)))]
    gram = group_gram(groups, gt.expand(len(groups), -1))
    loss = (features.mean(0) - gt).square().sum()
    variance = 1 - features.mean(0).square().sum()
    torch.testing.assert_close(cfm_loss_unbiased(gram).mean(), loss)
    torch.testing.assert_close(cfm_loss(gram).mean(), loss + variance / n)


def test_perfect_match_and_single_sample():
    phi = torch.ones(3, 4)
    assert cfm_loss(group_gram(phi, phi[0])).item() == pytest.approx(0, abs=1e-12)
    assert cfm_loss_unbiased(group_gram(phi, phi[0])).item() == pytest.approx(0, abs=1e-12)
    assert cfm_loss_unbiased(group_gram(phi[:1], phi[0])).isnan()
