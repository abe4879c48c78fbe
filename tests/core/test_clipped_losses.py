"""PPO, GSPO, dual clip, importance weights and the KL term: golden values, closed forms, sums over all tokens."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.core.clipped_losses import (
    ClipRange,
    clipped_loss,
    sampler_weights,
    sequence_ratio,
    token_ratio,
)
from openrlhf_ebft.core.loss_terms import CompletionTokens, LossSettings, policy_terms
from openrlhf_ebft.core.losses import count_tokens, kl_estimate

GOLDEN = Path(__file__).parents[1] / "golden"
CLIP = ClipRange(0.2, 0.3)
SETTINGS = LossSettings(
    "reinforce", "sequence_mean", max_tokens=8, clip=CLIP, rl_coef=1.0, ce_coef=0.0, entropy_coef=0.0
)


def make_tokens(lengths=(3, 1, 4), seed=0, **changes):
    torch.manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size = sum(lengths)
    tokens = CompletionTokens(
        logprobs=(-torch.rand(size, dtype=torch.float64)).requires_grad_(),
        entropy=torch.rand(size, dtype=torch.float64),
        sequence=sequence,
        advantages=torch.randn(len(lengths), dtype=torch.float64)[sequence],
        sampler_logprobs=-torch.rand(size, dtype=torch.float64),
    )
    return replace(tokens, **changes)


def terms_of(tokens, **settings):
    count = count_tokens(tokens.sequence)
    return policy_terms(replace(SETTINGS, **settings), tokens, count, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("part", ["all", "masked"])
def test_first_update_equals_the_golden_values(kind, part):
    golden = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / f"policy_loss_{kind}_{part}.npz").items()}
    grid = golden["log_probs"].clone().requires_grad_()
    acting, supervised = golden["rollout_mask"], ~golden["rollout_mask"]
    if part == "masked":
        acting, supervised = acting & golden["answer_mask"], supervised & golden["answer_mask"]
    row = torch.arange(3)[:, None].expand(3, 11)
    lengths = supervised.sum(-1)
    ce = -(grid * supervised).sum(-1)[lengths > 0].div(lengths[lengths > 0]).mean()
    tokens = CompletionTokens(
        grid[acting], torch.zeros(int(acting.sum())), row[acting], golden["advantages"][acting], grid[acting].detach()
    )
    settings = replace(SETTINGS, policy_loss=kind, ce_coef=0.03)
    terms = policy_terms(settings, tokens, count_tokens(tokens.sequence), ce)
    assert terms["rl_loss"].item() == pytest.approx(float(golden["rl_loss"]), rel=1e-5)
    assert terms["ce_loss"].item() == pytest.approx(float(golden["ce_loss"]), rel=1e-5)
    terms["loss"].backward()
    torch.testing.assert_close(grid.grad, golden["grad_of_rl_plus_0p03_ce"], atol=1e-7, rtol=1e-5)


CASES = [  # advantage, ratio, dual -> loss, its derivative by the ratio
    (1.0, 1.1, None, -1.1, -1.0),
    (1.0, 1.3, None, -1.3, -1.0),  # on the edge nothing is clipped yet
    (1.0, 1.5, None, -1.3, 0.0),
    (1.0, 0.5, None, -0.5, -1.0),
    (-2.0, 0.5, None, 1.6, 0.0),
    (-2.0, 1.5, None, 3.0, 2.0),
    (-2.0, 5.0, None, 10.0, 2.0),
    (-2.0, 5.0, 3.0, 6.0, 0.0),
    (-2.0, 2.5, 3.0, 5.0, 2.0),
    (2.0, 5.0, 3.0, -2.6, 0.0),  # the dual clip leaves positive advantages alone
]


@pytest.mark.parametrize(("advantage", "ratio", "dual", "loss", "slope"), CASES)
def test_clipping_in_numbers(advantage, ratio, dual, loss, slope):
    value = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    result = clipped_loss(value, torch.tensor([advantage], dtype=torch.float64), replace(CLIP, dual=dual))
    assert result.values.item() == pytest.approx(loss)
    result.values.sum().backward()
    assert value.grad.item() == pytest.approx(slope)
    assert result.clipped.item() == float(slope == 0)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_loss_and_gradient_equal_a_written_out_derivation(kind, dual):
    """Sequence by sequence in plain Python; derivatives of the unclipped branch by hand."""
    torch.manual_seed(3)
    tokens = make_tokens((3, 1, 5, 2), seed=3)
    old = tokens.logprobs.detach() + 0.6 * torch.randn(11, dtype=torch.float64)
    tokens = replace(tokens, old_logprobs=old)
    terms = terms_of(tokens, policy_loss=kind, clip=replace(CLIP, dual=dual))
    terms["loss"].backward()
    total, clipped, gradient = 0.0, 0, [0.0] * 11
    difference = (tokens.logprobs.detach() - old).tolist()
    for number in range(4):
        members = torch.nonzero(tokens.sequence == number).flatten().tolist()
        advantage = tokens.advantages[members[0]].item()
        mean = math.fsum(difference[i] for i in members) / len(members)
        for i in members:
            ratio = math.exp(mean if kind == "gspo" else difference[i])
            free, kept = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3)
            value, is_clipped = max(free, kept), kept > free
            if dual is not None and advantage < 0 and value > -dual * advantage:
                value, is_clipped = -dual * advantage, True
            total += value / len(members) / 4
            clipped += is_clipped
            if not is_clipped:
                receivers = members if kind == "gspo" else [i]
                for other in receivers:
                    gradient[other] += -advantage * ratio / len(receivers) / len(members) / 4
    assert terms["loss"].item() == pytest.approx(total)
    assert 0 < clipped < 11
    assert terms["policy/clipped_share"].item() == pytest.approx(clipped / 11)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(gradient, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean", "dr_grpo"])
@pytest.mark.parametrize(("kind", "exact"), [("ppo", True), ("gspo", False)])
def test_one_update_without_weights_is_reinforce(kind, exact, mode):
    gradients = []
    for policy_loss in ("reinforce", kind):
        tokens = make_tokens()
        terms_of(tokens, policy_loss=policy_loss, aggregation=mode)["loss"].backward()
        gradients.append(tokens.logprobs.grad)
    if exact:
        assert torch.equal(*gradients)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


def test_ratios_far_out_stay_numbers():
    logprobs = torch.tensor([0.0, -500.0, 0.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0, 0.0])
    for ratio in (token_ratio(logprobs, old), sequence_ratio(logprobs, old, torch.arange(3))):
        assert ratio.isfinite().all()
        result = clipped_loss(ratio, torch.tensor([1.0, -1.0, 1.0]), CLIP)
        (gradient,) = torch.autograd.grad(result.values.sum(), logprobs)
        assert gradient.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipRange(1.0, 0.2), "low < 1 and high >= 0, got 1.0"),
        (lambda: ClipRange(0.2, -0.1), "got 0.2 and -0.1"),
        (lambda: ClipRange(0.2, 0.2, 1.0), "above 1, got 1.0"),
        (lambda: sampler_weights(torch.zeros(1), torch.zeros(1), 0.0), "above 0, got 0.0"),
        (lambda: terms_of(make_tokens(), policy_loss="trpo"), "trpo"),
        (lambda: terms_of(make_tokens(), kl_coef=0.1), "reference model's log-probabilities"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sampler_weights_cut_the_loss_and_are_logged():
    """Trainer twice, half and four times as likely as the sampler, cap 2: weights 2, 0.5 and 2."""
    logprobs = torch.full((3,), -1.0, dtype=torch.float64).requires_grad_()
    ratio = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)
    tokens = CompletionTokens(
        logprobs, torch.zeros(3), torch.zeros(3, dtype=torch.long), torch.ones(3), logprobs.detach() - ratio.log()
    )
    terms = terms_of(tokens, sampler_cap=2.0)
    terms["loss"].backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([2.0, 0.5, 2.0], dtype=torch.float64) / 3)
    assert terms["tis/ratio"].item() == pytest.approx(6.5 / 3)
    assert terms["tis/capped_share"].item() == pytest.approx(1 / 3)
    assert terms["sampler_kl"].item() == pytest.approx(-math.log(4.0) / 3)


def test_sampler_weights_use_the_policy_of_rollout_time():
    """After an update the policy has moved on; the weights between sampler and trainer must not."""
    tokens = make_tokens()
    old = tokens.sampler_logprobs.clone()
    terms = terms_of(replace(tokens, old_logprobs=old), policy_loss="ppo", sampler_cap=2.0)
    assert terms["tis/ratio"].item() == pytest.approx(1.0)
    assert terms["sampler_kl"].item() == pytest.approx(0.0, abs=1e-12)
    plain = terms_of(replace(tokens, old_logprobs=old), policy_loss="ppo")
    assert terms["loss"].item() == plain["loss"].item()


def test_importance_weights_make_the_expected_gradient_the_trainers():
    """Summed over every token of a vocabulary of 4, with a cap that cuts nothing."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    sampler = torch.log_softmax(torch.tensor([0.0, 0.2, -0.4, 0.5], dtype=torch.float64), -1)
    reward = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad(-(logprobs.exp() * reward).sum(), logits, retain_graph=True)
    weights, _ = sampler_weights(logprobs, sampler, 1e6)
    values = -reward * weights * torch.exp(logprobs - logprobs.detach())
    (estimate,) = torch.autograd.grad((sampler.exp() * values).sum(), logits)
    torch.testing.assert_close(estimate, exact)


def test_kl_term_enters_the_loss_with_its_coefficient():
    tokens = make_tokens()
    reference = -torch.rand(8, dtype=torch.float64)
    with_kl = terms_of(replace(tokens, reference_logprobs=reference), kl_coef=0.3, kl_estimator="k2")
    plain = terms_of(tokens)
    difference = 0.5 * (tokens.logprobs.detach() - reference).square()
    expected = np.mean([difference[tokens.sequence == s].mean().item() for s in range(3)])
    assert with_kl["kl"].item() == pytest.approx(expected)
    assert (with_kl["loss"] - plain["loss"]).item() == pytest.approx(0.3 * expected)


def test_what_each_kl_estimator_pulls_towards():
    """Expected gradients, summed over every token of a vocabulary of 4: docs/policy.md says this in words.

    k1 as a loss term has no gradient on average; k2's is that of KL(policy || reference), k3's that of
    KL(reference || policy).
    """
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    reference = torch.log_softmax(torch.tensor([0.0, 0.2, -0.4, 0.5], dtype=torch.float64), -1)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def expected(estimator):
        return (logprobs.exp().detach() * kl_estimate(logprobs, reference, estimator)).sum()

    forward = (logprobs.exp() * (logprobs - reference)).sum()
    backward = (reference.exp() * (reference - logprobs)).sum()
    assert expected("k1").item() == pytest.approx(forward.item())
    assert expected("k3").item() == pytest.approx(forward.item())
    torch.testing.assert_close(gradient(expected("k1")), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(expected("k2")), gradient(forward))
    torch.testing.assert_close(gradient(expected("k3")), gradient(backward))
