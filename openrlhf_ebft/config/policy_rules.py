"""Rules between the keys of the policy's loss, its updates and its schedule; `rules.py` runs them with all others."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ebft.config.sections import EBFTConfig


def _updates_have_a_loss(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.loss == "reinforce" and policy.updates_per_batch > 1:
        yield (
            f"policy.updates_per_batch = {policy.updates_per_batch} trains on completions of an older policy, which "
            "policy.loss = reinforce does not correct for: set policy.loss to ppo or gspo, or "
            "policy.updates_per_batch to 1"
        )
    if policy.updates_per_batch % policy.mini_batches:
        below = policy.updates_per_batch // policy.mini_batches * policy.mini_batches
        nearest = [str(value) for value in (below, below + policy.mini_batches) if value]
        yield (
            f"policy.updates_per_batch = {policy.updates_per_batch} does not take each of policy.mini_batches = "
            f"{policy.mini_batches} equally often: set policy.updates_per_batch to {' or '.join(nearest)}"
        )


def _clips_have_a_ratio(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.loss != "reinforce":
        return
    for name in ("clip_low", "clip_high", "dual_clip"):
        value = getattr(policy, name)
        if value is not None:
            yield (
                f"policy.{name} = {value} clips a ratio, but policy.loss = reinforce has none: set policy.loss to ppo "
                f"or gspo, or leave policy.{name} out"
            )


def _one_warmup(config: EBFTConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} and optimizer.warmup_ratio = {optimizer.warmup_ratio} "
            "are two lengths of one warm-up: leave one of them out"
        )


def _one_size_of_micro_batches(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.max_tokens_per_micro_batch is not None and policy.micro_batch_size > 1:
        yield (
            f"policy.micro_batch_size = {policy.micro_batch_size} and policy.max_tokens_per_micro_batch = "
            f"{policy.max_tokens_per_micro_batch} are two sizes of a micro-batch: leave one of them out"
        )


def _note_single_update(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.loss != "reinforce" and policy.updates_per_batch == 1:
        yield (f"policy.loss = {policy.loss} with policy.updates_per_batch = 1 has ratios of 1: the same as reinforce")


POLICY_RULES = (_updates_have_a_loss, _clips_have_a_ratio, _one_warmup, _one_size_of_micro_batches)
POLICY_NOTES = (_note_single_update,)
