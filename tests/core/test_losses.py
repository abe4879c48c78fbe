"""Loss terms against golden values, closed forms and re-cut batches."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.clipped_losses import sequence_ratio
from openrlhf_ebft.core.logprobs import Predictions, chunked_logprobs, token_logprobs
from openrlhf_ebft.core.losses import (
    GlobalCount,
    aggregate,
    count_tokens,
    kl_estimate,
    on_policy_loss,
)

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["ppo_all", "ppo_masked", "gspo_all", "gspo_masked"])
def test_policy_and_cross_entropy_loss_equal_the_golden_values(name):
    golden = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / f"policy_loss_{name}.npz").items()}
    grid = golden["log_probs"].clone().requires_grad_()
    row = torch.arange(3)[:, None].expand(3, 11)
    acting, supervised = golden["rollout_mask"], ~golden["rollout_mask"]
    if name.endswith("masked"):
        acting, supervised = acting & golden["answer_mask"], supervised & golden["answer_mask"]
    sequence, advantages = row[acting], golden["advantages"][acting]
    if name.startswith("ppo"):
        values = on_policy_loss(grid[acting], advantages)
    else:
        values = -advantages * sequence_ratio(grid[acting], grid[acting].detach(), sequence)
    rl_loss = aggregate(values, sequence, count_tokens(sequence), "sequence_mean")
    ce_loss = aggregate(-grid[supervised], row[supervised], count_tokens(row[supervised]), "sequence_mean")
    assert rl_loss.item() == pytest.approx(float(golden["rl_loss"]), rel=1e-5)
    assert ce_loss.item() == pytest.approx(float(golden["ce_loss"]), rel=1e-5)
    (rl_loss + 0.03 * ce_loss).backward()
    torch.testing.assert_close(grid.grad, golden["grad_of_rl_plus_0p03_ce"], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_the_golden_values(estimator):
    golden = np.load(GOLDEN / "kl.npz")
    logprobs, reference = torch.from_numpy(golden["log_probs"]), torch.from_numpy(golden["log_probs_ref"])
    torch.testing.assert_close(kl_estimate(logprobs, reference, estimator), torch.from_numpy(golden[estimator]))


def test_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_temperature_enters_logprobs_and_entropy_once():
    """Case B04: logits [0, ln 3], token 1, T = 0.5."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprob, entropy = token_logprobs(logits, torch.tensor([1]), 0.5)
    assert logprob.item() == pytest.approx(-0.105361, abs=1e-6)
    assert entropy.item() == pytest.approx(0.325083, abs=1e-6)
    again, _ = token_logprobs(logits, torch.tensor([1]), 0.5)
    assert again.item() == logprob.item(), "the logits were scaled in place"


@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
def test_chunked_logprobs_equal_plain_ones_with_gradients(chunk):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20)
    hidden = torch.randn(7, 8, requires_grad=True)
    states = torch.tensor([5, 0, 5, 3, 5, 6, 0, 1, 5])  # several targets of one state, out of order
    targets = torch.randint(0, 20, (9,))
    temperature = torch.tensor([0.6, 0.6, 0.6, 0.6, 1.0, 1.0, 1.0, 0.6, 0.6])
    weights = torch.randn(9)
    wanted = Predictions.of(states, targets, temperature)
    assert wanted.states.numel() == 7, "state 5 and temperature 0.6 stand there three times"
    results = []
    for compute in (
        lambda: chunked_logprobs(head, hidden, wanted, chunk, with_entropy=True),
        lambda: token_logprobs(head(hidden[states]), targets, temperature),
    ):
        head.zero_grad()
        hidden.grad = None
        logprobs, entropy = compute()
        (logprobs * weights + entropy).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad.clone(), head.weight.grad.clone()))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("which", ["chosen", "entropy", "both"])
@pytest.mark.parametrize("count", [5, 32, 77])
def test_gradients_of_token_logprobs_equal_autograds(which, count):
    torch.manual_seed(1)
    logits = torch.randn(count, 30, requires_grad=True)
    rows = torch.randint(0, count, (2 * count,)).sort().values  # some rows twice or more, some not at all
    targets = torch.randint(0, 30, (2 * count,))
    rows[3], targets[3] = rows[2], targets[2]  # one entry twice
    temperature, first, second = torch.rand(count) + 0.5, torch.randn(2 * count), torch.randn(2 * count)
    results = []
    for plain in (False, True):
        if plain:
            logprobs = torch.log_softmax(logits.double() / temperature[:, None], -1)
            chosen, entropy = logprobs[rows, targets], -(logprobs.exp() * logprobs).sum(-1)[rows]
        else:
            chosen, entropy = token_logprobs(logits, targets, temperature, rows)
        loss = (chosen * first).sum() * (which != "entropy") + (entropy * second).sum() * (which != "chosen")
        results.append((chosen.double(), entropy.double(), torch.autograd.grad(loss, logits)[0]))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-6, rtol=1e-5)


def test_entropies_may_come_without_gradients():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 20), torch.randn(3, 8, requires_grad=True)
    wanted = Predictions.of(torch.arange(3), torch.tensor([1, 2, 3]), torch.ones(3))
    results = [chunked_logprobs(head, hidden, wanted, 2, with_entropy=flag) for flag in (True, False)]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].requires_grad and not results[1][1].requires_grad
    assert torch.equal(results[0][0], results[1][0]) and results[1][0].requires_grad


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean", "dr_grpo"])
def test_empty_batch_gives_zero_loss_and_zero_gradients(mode):
    """Case B06: every completion masked."""
    head = torch.nn.Linear(8, 20)
    hidden = torch.randn(4, 8, requires_grad=True)
    empty = torch.empty(0, dtype=torch.long)
    wanted = Predictions.of(empty, empty, torch.ones(0))
    logprobs, _ = chunked_logprobs(head, hidden, wanted, 2, with_entropy=True)
    loss = aggregate(on_policy_loss(logprobs, torch.ones(0)), empty, GlobalCount(0, 0), mode, max_tokens=8)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_token_mean_does_not_depend_on_the_micro_batch():
    """Case B08: lengths 1 and 3, advantages +1 and -1, ratio 1."""
    sequence = torch.tensor([0, 1, 1, 1])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    count = count_tokens(sequence)
    gradients = []
    for cuts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        logprobs = torch.zeros(4, requires_grad=True)
        losses = [aggregate(on_policy_loss(logprobs[c], advantages[c]), sequence[c], count, "token_mean") for c in cuts]
        total = torch.stack(losses).sum()
        total.backward()
        assert total.item() == pytest.approx(0.5)
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean", "dr_grpo"])
def test_every_aggregation_adds_up_over_micro_batches(mode):
    torch.manual_seed(1)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([2, 5, 1, 3]))
    values = torch.randn(11)
    count = count_tokens(sequence)
    whole = aggregate(values, sequence, count, mode, max_tokens=8)
    cut = [(sequence >= low) & (sequence < high) for low, high in ((0, 1), (1, 3), (3, 4))]
    parts = sum(aggregate(values[m], sequence[m], count, mode, max_tokens=8) for m in cut)
    torch.testing.assert_close(parts, whole)
    expected = {
        "sequence_mean": np.mean([values[sequence == s].mean().item() for s in range(4)]),
        "token_mean": values.mean().item(),
        "dr_grpo": values.sum().item() / (4 * 8),
    }[mode]
    assert whole.item() == pytest.approx(expected, rel=1e-5)
    assert count == GlobalCount(4, 11)


def test_dr_grpo_needs_its_constant():
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate(torch.zeros(1), torch.zeros(1, dtype=torch.long), GlobalCount(1, 1), "dr_grpo")
