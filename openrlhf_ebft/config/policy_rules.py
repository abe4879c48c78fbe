"""Rules between the keys of the policy's loss, its updates and its schedule; `rules.py` runs them with all others."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from openrlhf_ebft.config.section import Section
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.config.training_sections import PolicyConfig


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


def _sft_reads_no_rewards(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.objective != "sft":
        return
    if policy.sft_warmup_steps:
        yield (
            f"policy.sft_warmup_steps = {policy.sft_warmup_steps} comes before EBFT, but policy.objective = sft is "
            "supervised throughout: set policy.max_steps or policy.epochs instead"
        )
    for name in ("loss", "updates_per_batch", "tis_cap", "kl_coef", "entropy_coef"):
        if _is_set(policy, name, PolicyConfig.model_fields[name]):
            yield (
                f"policy.{name} = {getattr(policy, name)} acts on completions, but policy.objective = sft trains on "
                f"the ground truth alone: leave policy.{name} out, or set policy.objective to ebft"
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


def _function_coef_has_a_function(config: EBFTConfig) -> Iterator[str]:
    reward = config.reward
    if reward.function is None and reward.function_coef != 1:
        yield (
            f"reward.function_coef = {reward.function_coef} weighs a function, but reward.function = null: name one, "
            "or leave reward.function_coef out"
        )


def _average_is_kept(config: EBFTConfig) -> Iterator[str]:
    wants = {"policy.export_ema": config.policy.export_ema, "evaluation.use_ema": config.evaluation.use_ema}
    for key, wanted in wants.items():
        if wanted and config.policy.ema_decay is None:
            yield (
                f"{key} = true takes averaged weights, but policy.ema_decay = null keeps none: set policy.ema_decay "
                f"(0.9), or {key} to false"
            )


def _reference_has_a_term(config: EBFTConfig) -> Iterator[str]:
    policy, reference = config.policy, config.reference
    if policy.kl_coef == 0:
        changed = [name for name, field in type(reference).model_fields.items() if _is_set(reference, name, field)]
        if policy.kl_estimator != "k3":
            yield f"policy.kl_estimator = {policy.kl_estimator} estimates a term that policy.kl_coef = 0 leaves out"
        for name in changed:
            yield (
                f"reference.{name} = {getattr(reference, name)} belongs to the KL term, but policy.kl_coef = 0: set "
                f"policy.kl_coef above 0 (0.01), or leave reference.{name} out"
            )
        return
    if reference.source == "separate":
        return
    if not config.lora.is_on:
        yield (
            "reference.source = policy_base takes the policy's own frozen weights, but with lora.rank = 0 all weights "
            "train: set lora.rank to 1 or more (16), or reference.source to separate"
        )
    for name in ("path", "dtype", "num_replicas"):
        if _is_set(reference, name, type(reference).model_fields[name]):
            yield (
                f"reference.{name} = {getattr(reference, name)}, but reference.source = policy_base takes the "
                f"trainer's own base model: leave reference.{name} out, or set reference.source to separate"
            )


def _is_set(section: Section, name: str, field: FieldInfo) -> bool:
    return bool(getattr(section, name) != field.default)


def _note_kl_estimator(config: EBFTConfig) -> Iterator[str]:
    if config.policy.kl_coef > 0 and config.policy.kl_estimator == "k1":
        yield (
            "policy.kl_estimator = k1: as a loss term its gradient is 0 on average, so it adds noise and no pull: "
            "take k2 (reverse KL) or k3"
        )


def _note_single_update(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    if policy.loss != "reinforce" and policy.updates_per_batch == 1:
        yield (f"policy.loss = {policy.loss} with policy.updates_per_batch = 1 has ratios of 1: the same as reinforce")


POLICY_RULES = (
    _updates_have_a_loss,
    _clips_have_a_ratio,
    _one_warmup,
    _one_size_of_micro_batches,
    _function_coef_has_a_function,
    _average_is_kept,
    _reference_has_a_term,
    _sft_reads_no_rewards,
)
POLICY_NOTES = (_note_kl_estimator, _note_single_update)
