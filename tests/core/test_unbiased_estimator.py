"""Exact enumeration: which estimators follow the gradient of the feature-matching loss, and by how much others miss it.

A tabular policy over 5 completions, logits theta (5,), unit-length features in R^3, float64. The expected gradient
estimate E[mean_j advantage_j * grad log p(y_j)] is summed over all 5^n groups and compared with minus the gradient of
the loss ||E phi - phi_gt||^2, in closed form by autograd. docs/conventions.md quotes the sizes tested here.
"""

import itertools

import pytest
import torch

from openrlhf_ebft.core.advantages import compute_advantages
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.rewards import compute_rewards

NUM_COMPLETIONS = 5


def setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """theta (5,), unit features (5, 3), unit ground truth (3,)."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(NUM_COMPLETIONS + 1, 3, dtype=torch.float64, generator=generator)
    rows = torch.nn.functional.normalize(draw, dim=-1)
    theta = torch.randn(NUM_COMPLETIONS, dtype=torch.float64, generator=generator)
    return theta, rows[:-1], rows[-1]


def loss_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the alignment part -2 <E phi, gt> and of the diversity part ||E phi||^2."""
    theta, features, truth = setting()
    theta.requires_grad_()
    mean = torch.softmax(theta, 0) @ features
    alignment = torch.autograd.grad(-2 * mean @ truth, theta, retain_graph=True)[0]
    return alignment, torch.autograd.grad(mean @ mean, theta)[0]


def expected_estimate(n: int, estimator: str, whitening: str = "none") -> torch.Tensor:
    theta, features, truth = setting()
    probabilities = torch.softmax(theta, 0)
    groups = torch.tensor(list(itertools.product(range(NUM_COMPLETIONS), repeat=n)))  # (5^n, n)
    rewards = compute_rewards(group_gram(features[groups], truth.expand(len(groups), -1)), whitening=whitening)
    advantages = compute_advantages(rewards, estimator)
    scores = torch.eye(NUM_COMPLETIONS, dtype=torch.float64)[groups] - probabilities  # grad log p(y_j): (5^n, n, 5)
    estimate = (advantages.unsqueeze(-1) * scores).mean(1)
    return probabilities[groups].prod(1) @ estimate


def relative_bias(n: int, estimator: str, whitening: str = "none") -> float:
    right = -sum(loss_gradients())
    return float((expected_estimate(n, estimator, whitening) - right).norm() / right.norm())


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("estimator", ["rloo", "reinforce"])
def test_rloo_and_reinforce_are_unbiased(n, estimator):
    torch.testing.assert_close(expected_estimate(n, estimator), -sum(loss_gradients()), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rloo_simple_shrinks_the_diversity_gradient(n):
    """By (n-2)/(n-1): to nothing when n = 2."""
    alignment, diversity = loss_gradients()
    right = -(alignment + (n - 2) / (n - 1) * diversity)
    torch.testing.assert_close(expected_estimate(n, "rloo_simple"), right, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dr_grpo_shrinks_both(n):
    """Alignment by (n-1)/n, diversity by (n-2)/n."""
    alignment, diversity = loss_gradients()
    right = -((n - 1) / n * alignment + (n - 2) / n * diversity)
    torch.testing.assert_close(expected_estimate(n, "dr_grpo"), right, atol=1e-12, rtol=1e-10)


# ||E estimate - (-grad)|| / ||grad|| for n = 2, 3, 4: the table of docs/conventions.md.
BIASES = {
    ("rloo", "none"): (0, 0, 0),
    ("reinforce", "none"): (0, 0, 0),
    ("rloo_simple", "none"): (0.512, 0.256, 0.171),
    ("dr_grpo", "none"): (0.305, 0.204, 0.153),
    ("group_norm", "none"): (0.583, 0.478, 0.313),
    ("rloo", "feature"): (0.424, 0.310, 0.217),
    ("rloo", "sample"): (0.237, 0.106, 0.167),
}


@pytest.mark.parametrize(("kind", "sizes"), BIASES.items())
def test_sizes_of_the_biases(kind, sizes):
    assert [relative_bias(n, *kind) for n in (2, 3, 4)] == pytest.approx(sizes, abs=6e-4)
