"""Rules between keys: each names the keys, their values and the nearest values that work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrlhf_ebft.config.evaluation_rules import EVALUATION_RULES
from openrlhf_ebft.config.lora_rules import LORA_RULES
from openrlhf_ebft.config.multiples import nearest_multiples
from openrlhf_ebft.config.policy_rules import POLICY_NOTES, POLICY_RULES
from openrlhf_ebft.config.sections import DataConfig, EBFTConfig

STRIDED_KEYS = (
    "text_column",
    "stride",
    "context_length",
    "generate_max_len",
    "sequence_length",
    "pack_documents",
    "min_completion_prefix",
)
"""Keys of the data section that only strided mode reads."""

Rule = Callable[[EBFTConfig], Iterator[str]]


def check_rules(config: EBFTConfig) -> list[str]:
    """Returns one sentence for each broken rule, none for a configuration that can run."""
    return [problem for rule in _RULES for problem in rule(config)]


def list_notes(config: EBFTConfig) -> list[str]:
    """Returns one sentence for each choice that is allowed but changes what a run means."""
    return [note for rule in _NOTES for note in rule(config)]


def _batch_divides(config: EBFTConfig) -> Iterator[str]:
    policy = config.policy
    unit = policy.num_ranks * policy.micro_batch_size * policy.mini_batches
    if policy.prompts_per_step % unit:
        nearest = " or ".join(str(value) for value in nearest_multiples(policy.prompts_per_step, unit))
        cut = f" times policy.mini_batches = {policy.mini_batches}" if policy.mini_batches > 1 else ""
        yield (
            f"policy.prompts_per_step = {policy.prompts_per_step} does not divide into policy.num_ranks = "
            f"{policy.num_ranks} times policy.micro_batch_size = {policy.micro_batch_size}{cut} "
            f"({unit} prompts at a time): "
            f"set policy.prompts_per_step to {nearest}"
        )


def _advantage_has_siblings(config: EBFTConfig) -> Iterator[str]:
    if config.rollout.samples_per_prompt == 1 and config.reward.advantage != "reinforce":
        yield (
            f"reward.advantage = {config.reward.advantage} compares a completion with its siblings, but "
            "rollout.samples_per_prompt = 1: set rollout.samples_per_prompt to 2 or more, "
            "or reward.advantage to reinforce"
        )


def _loss_has_a_term(config: EBFTConfig) -> Iterator[str]:
    policy, reward = config.policy, config.reward
    if policy.objective == "sft":
        return
    if policy.rl_coef == 0 and policy.ce_coef == 0:
        yield "policy.rl_coef = 0 and policy.ce_coef = 0 leave nothing to learn from: set one of them above 0"
    with_function = reward.function is not None and reward.function_coef > 0
    if policy.rl_coef > 0 and reward.alignment_coef == 0 and reward.diversity_coef == 0 and not with_function:
        yield (
            "reward.alignment_coef = 0 and reward.diversity_coef = 0 make every reward 0: set one of them above 0, "
            "name a reward.function, "
            f"or policy.rl_coef = {policy.rl_coef} to 0"
        )


def _sampling_explores(config: EBFTConfig) -> Iterator[str]:
    if config.policy.objective == "sft":
        return
    if config.rollout.temperature == 0 and config.policy.rl_coef > 0:
        yield (
            "rollout.temperature = 0 samples the same completion every time, but policy.rl_coef = "
            f"{config.policy.rl_coef} needs different ones: set rollout.temperature above 0 (0.6), "
            "or policy.rl_coef to 0"
        )
    if config.rollout.top_k == 1 and config.policy.rl_coef > 0:
        yield (
            f"rollout.top_k = 1 samples the same completion every time, but policy.rl_coef = "
            f"{config.policy.rl_coef} needs different ones: set rollout.top_k to 0 (off) or 2 or more"
        )


def _steps_fit_the_schedule(config: EBFTConfig) -> Iterator[str]:
    policy, warmup = config.policy, config.optimizer.warmup_steps
    if policy.max_steps is None:
        return
    total = policy.max_steps * policy.updates_per_batch + policy.sft_warmup_steps
    if total == 0:
        yield "policy.max_steps = 0 and policy.sft_warmup_steps = 0 train nothing: set one of them to 1 or more"
    elif warmup > total:
        yield (
            f"optimizer.warmup_steps = {warmup} is longer than the run, policy.max_steps = {policy.max_steps} "
            f"{_times_updates(config)}+ policy.sft_warmup_steps = {policy.sft_warmup_steps}: "
            f"set optimizer.warmup_steps to {total} or less"
        )


def _times_updates(config: EBFTConfig) -> str:
    updates = config.policy.updates_per_batch
    return f"* policy.updates_per_batch = {updates} " if updates > 1 else ""


def _lengths_fit(config: EBFTConfig) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if data.mode == "strided":
        return
    needed = data.max_prompt_tokens + rollout.max_new_tokens
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield (
            f"rollout.max_model_len = {rollout.max_model_len} is below data.max_prompt_tokens = "
            f"{data.max_prompt_tokens} + rollout.max_new_tokens = {rollout.max_new_tokens}: set "
            f"rollout.max_model_len to {needed} or more"
        )
    if rollout.min_length_limit > rollout.max_new_tokens:
        yield (
            f"rollout.min_length_limit = {rollout.min_length_limit} is above rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}: set rollout.min_length_limit to {rollout.max_new_tokens} or less"
        )
    if data.min_ground_truth_tokens > data.max_ground_truth_tokens:
        yield (
            f"data.min_ground_truth_tokens = {data.min_ground_truth_tokens} is above data.max_ground_truth_tokens = "
            f"{data.max_ground_truth_tokens}: set data.min_ground_truth_tokens to at most that"
        )


def _data_is_read(config: EBFTConfig) -> Iterator[str]:
    data = config.data
    if data.messages_column is None and data.prompt_column == data.ground_truth_column:
        yield (
            f"data.prompt_column = {data.prompt_column} and data.ground_truth_column = {data.ground_truth_column} "
            "are the same column: name two"
        )
    if data.chat_template is not None and data.messages_column is None and not data.apply_chat_template:
        yield (
            f"data.chat_template = {data.chat_template} is used only with chat rows, but data.messages_column = null "
            "and data.apply_chat_template = false: set one of them"
        )
    if data.history == "own" and (data.turns == "last" or data.mode == "strided"):
        wrong = "data.turns = last" if data.turns == "last" else "data.mode = strided"
        yield (
            f"data.history = own samples the turns of a chat one after the other, but {wrong}: set data.turns to all "
            "and data.mode to structured, or data.history to ground_truth"
        )
    if data.turns == "all":
        if data.messages_column is None:
            yield (
                "data.turns = all needs chats, but data.messages_column = null: name their column, or set data.turns "
                "to last"
            )
        if data.over_long_prompt == "truncate_left":
            yield (
                "data.over_long_prompt = truncate_left would cut through the turns of data.turns = all: set "
                "data.over_long_prompt to skip or error, or data.turns to last"
            )
    if data.heldout_fraction == 1:
        yield "data.heldout_fraction = 1 leaves no training rows: set data.heldout_fraction below 1 (0.05)"


def _strided_keys_belong_to_strided_mode(config: EBFTConfig) -> Iterator[str]:
    if config.data.mode == "strided":
        return
    defaults = DataConfig.model_fields
    for name in STRIDED_KEYS:
        value = getattr(config.data, name)
        if value != defaults[name].default:
            yield (
                f"data.{name} = {value} belongs to strided mode, but data.mode = structured: set data.mode to strided, "
                f"or leave data.{name} out"
            )


def _anchors_fit(config: EBFTConfig) -> Iterator[str]:
    data, rollout = config.data, config.rollout
    if data.mode != "strided":
        return
    needed = data.context_length + data.generate_max_len
    if data.sequence_length < needed:
        yield (
            f"data.sequence_length = {data.sequence_length} has no room for an anchor: data.context_length = "
            f"{data.context_length} + data.generate_max_len = {data.generate_max_len} are {needed} tokens; set "
            f"data.sequence_length to {needed} or more"
        )
    if rollout.max_model_len is not None and rollout.max_model_len <= data.sequence_length:
        yield (
            f"rollout.max_model_len = {rollout.max_model_len} does not hold data.sequence_length = "
            f"{data.sequence_length} and one token more: set rollout.max_model_len to {data.sequence_length + 1} "
            "or more, or leave it out"
        )
    if data.pack_documents and config.model.attention == "rows":
        yield (
            "data.pack_documents = true needs an attention that masks documents, but model.attention = rows: set "
            "model.attention to sdpa or eager, or data.pack_documents to false"
        )
    if data.text_column is None:
        return
    if data.messages_column is not None or data.apply_chat_template:
        other = "data.messages_column" if data.messages_column is not None else "data.apply_chat_template"
        yield (f"data.text_column = {data.text_column} reads raw documents and {other} reads chats: keep one of them")
    if data.min_completion_prefix > 0:
        yield (
            f"data.min_completion_prefix = {data.min_completion_prefix} counts tokens of an answer, but "
            f"data.text_column = {data.text_column} reads raw documents: set data.context_length instead"
        )


def _best_checkpoints_are_measured(config: EBFTConfig) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if checkpoint.keep_best and not (evaluation.every_steps and evaluation.max_examples):
        yield (
            f"checkpoint.keep_best = {checkpoint.keep_best} needs evaluations to find the best, but "
            f"evaluation.every_steps = {evaluation.every_steps} and evaluation.max_examples = "
            f"{evaluation.max_examples}: set both above 0, or checkpoint.keep_best to 0"
        )


def _features_are_distinct(config: EBFTConfig) -> Iterator[str]:
    fractions = config.features.layer_fractions
    if len(set(fractions)) < len(fractions):
        yield (
            f"features.layer_fractions = {list(fractions)} names a depth twice: "
            f"set features.layer_fractions to {sorted(set(fractions))}"
        )


def _windows_have_one_length(config: EBFTConfig) -> Iterator[str]:
    if config.features.embed_method == "concat_tokens" and config.data.mode != "strided":
        yield (
            "features.embed_method = concat_tokens needs windows of one length, but data.mode = "
            f"{config.data.mode}: set features.embed_method to completion_mean, or data.mode to strided"
        )


def _engine_can_do_it(config: EBFTConfig) -> Iterator[str]:
    rollout, path = config.rollout, config.model.path
    if rollout.engine == "vllm" and path.endswith(".gguf"):
        yield (
            f"rollout.engine = vllm cannot serve model.path = {path}: set rollout.engine to transformers, or convert "
            f"the file first (openrlhf-ebft prepare-model {path} --out FOLDER) and set model.path to that folder"
        )
    if rollout.engine != "transformers":
        return
    if rollout.tensor_parallel_size > 1:
        yield (
            f"rollout.tensor_parallel_size = {rollout.tensor_parallel_size} needs rollout.engine = vllm, but "
            "rollout.engine = transformers: set rollout.tensor_parallel_size to 1, or rollout.engine to vllm"
        )
    if rollout.weight_transfer in ("nccl", "ipc"):
        yield (
            f"rollout.weight_transfer = {rollout.weight_transfer} needs rollout.engine = vllm, but rollout.engine = "
            "transformers: set rollout.weight_transfer to auto or object_store"
        )


def _gpu_shares_exist(config: EBFTConfig) -> Iterator[str]:
    for name in ("gpus_per_trainer_rank", "gpus_per_feature_replica"):
        value = getattr(config.placement, name)
        if value > 1 and value % 1:
            yield (
                f"placement.{name} = {value}: above one, Ray gives whole GPUs only: set placement.{name} to "
                f"{int(value)} or {int(value) + 1}"
            )


def _offload_has_a_stage(config: EBFTConfig) -> Iterator[str]:
    if config.deepspeed.offload_optimizer and config.deepspeed.zero_stage == 0:
        yield (
            "deepspeed.offload_optimizer = true needs sharded optimizer states, but deepspeed.zero_stage = 0: "
            "set deepspeed.zero_stage to 1, 2 or 3, or deepspeed.offload_optimizer to false"
        )


def _note_sampling(config: EBFTConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.samples_per_prompt == 1:
        yield "rollout.samples_per_prompt = 1: the diversity term is 0, rewards are alignment alone"
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: completions come from a truncated "
            "distribution, while the policy loss uses the whole one, so its gradient is biased"
        )
    if rollout.sync_every_steps > 1:
        yield f"rollout.sync_every_steps = {rollout.sync_every_steps}: completions may come from older weights"


def _note_unread_keys(config: EBFTConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio > 0:
        yield f"optimizer.min_lr_ratio = {optimizer.min_lr_ratio} is not used by optimizer.schedule = constant"


_RULES: tuple[Rule, ...] = (
    _batch_divides,
    _advantage_has_siblings,
    _loss_has_a_term,
    _sampling_explores,
    _steps_fit_the_schedule,
    _lengths_fit,
    _data_is_read,
    _strided_keys_belong_to_strided_mode,
    _anchors_fit,
    _best_checkpoints_are_measured,
    _features_are_distinct,
    _windows_have_one_length,
    _engine_can_do_it,
    _gpu_shares_exist,
    _offload_has_a_stage,
    *EVALUATION_RULES,
    *LORA_RULES,
    *POLICY_RULES,
)
_NOTES: tuple[Rule, ...] = (_note_sampling, _note_unread_keys, *POLICY_NOTES)
