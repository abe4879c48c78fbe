"""Every cross-field rule: what it rejects, which keys it names, and that the values it offers are accepted."""

import pytest

from openrlhf_ebft.config import ConfigError, load_config
from openrlhf_ebft.config.multiples import nearest_multiples
from openrlhf_ebft.config.rules import list_notes


@pytest.fixture
def problems(write_config):
    def check(*flags):
        try:
            load_config(write_config(), flags)
        except ConfigError as error:
            return error.problems
        return ()

    return check


BATCH = ("--policy.micro_batch_size=2", "--policy.num_ranks=7")


def test_case_b12_batch_that_does_not_divide(problems):
    (problem,) = problems("--policy.prompts_per_step=256", *BATCH)
    for text in ("policy.prompts_per_step = 256", "policy.num_ranks = 7", "policy.micro_batch_size = 2", "252 or 266"):
        assert text in problem


@pytest.mark.parametrize("value", [252, 266])
def test_case_b12_offered_values_work(problems, value):
    assert problems(f"--policy.prompts_per_step={value}", *BATCH) == ()


def test_nearest_multiple_is_never_zero(problems):
    (problem,) = problems("--policy.prompts_per_step=5", *BATCH)
    assert problem.endswith("set policy.prompts_per_step to 14")
    assert nearest_multiples(5, 14) == [14]
    assert nearest_multiples(28, 14) == [28, 42]


REJECTED = [
    (["rollout.samples_per_prompt=1"], ["reward.advantage = rloo", "rollout.samples_per_prompt = 1", "reinforce"]),
    (["rollout.samples_per_prompt=1", "reward.advantage=group_norm"], ["reward.advantage = group_norm"]),
    (["policy.rl_coef=0", "policy.ce_coef=0"], ["policy.rl_coef = 0", "policy.ce_coef = 0", "above 0"]),
    (["reward.alignment_coef=0", "reward.diversity_coef=0"], ["reward.alignment_coef = 0", "policy.rl_coef = 1.0"]),
    (["rollout.temperature=0"], ["rollout.temperature = 0", "policy.rl_coef = 1.0"]),
    (["rollout.top_k=1"], ["rollout.top_k = 1", "policy.rl_coef = 1.0"]),
    (
        ["policy.max_steps=3", "optimizer.warmup_steps=5", "policy.sft_warmup_steps=1"],
        ["= 5", "= 3", "= 1", "4 or less"],
    ),
    (
        ["policy.max_steps=3", "optimizer.warmup_steps=9", "policy.loss=ppo", "policy.updates_per_batch=2"],
        ["= 9", "policy.updates_per_batch = 2", "6 or less"],
    ),
    (
        ["policy.micro_batch_size=2", "policy.max_tokens_per_micro_batch=512", "policy.prompts_per_step=4"],
        ["policy.micro_batch_size = 2", "policy.max_tokens_per_micro_batch = 512", "leave one of them out"],
    ),
    (["features.embed_method=concat_tokens"], ["concat_tokens", "data.mode = structured", "completion_mean"]),
    (["data.history=own"], ["data.history = own", "data.turns = last", "ground_truth"]),
    (["data.turns=all"], ["data.turns = all", "data.messages_column = null"]),
    (
        ["data.turns=all", "data.messages_column=chat", "data.over_long_prompt=truncate_left"],
        ["data.over_long_prompt = truncate_left", "skip or error"],
    ),
    (["policy.updates_per_batch=2"], ["policy.updates_per_batch = 2", "policy.loss = reinforce", "ppo or gspo"]),
    (
        ["policy.loss=gspo", "policy.updates_per_batch=3", "policy.mini_batches=2"],
        ["policy.updates_per_batch = 3", "policy.mini_batches = 2", "to 2 or 4"],
    ),
    (
        ["policy.loss=gspo", "policy.updates_per_batch=3", "policy.mini_batches=3"],
        ["policy.prompts_per_step = 16", "policy.mini_batches = 3", "15 or 18"],
    ),
    (["policy.clip_low=0.1"], ["policy.clip_low = 0.1", "policy.loss = reinforce"]),
    (["reward.function_coef=2"], ["reward.function_coef = 2.0", "reward.function = null"]),
    (
        ["reward.alignment_coef=0", "reward.diversity_coef=0", "reward.function=f.py:g", "reward.function_coef=0"],
        ["reward.alignment_coef = 0"],
    ),
    (["policy.export_ema=true"], ["policy.export_ema = true", "policy.ema_decay = null"]),
    (["evaluation.use_ema=true"], ["evaluation.use_ema = true", "policy.ema_decay = null"]),
    (["policy.objective=sft", "policy.sft_warmup_steps=3"], ["policy.sft_warmup_steps = 3", "policy.objective = sft"]),
    (["policy.objective=sft", "policy.kl_coef=0.1"], ["policy.kl_coef = 0.1", "policy.objective = sft"]),
    (["policy.objective=sft", "policy.tis_cap=2"], ["policy.tis_cap = 2.0", "policy.objective = sft"]),
    (["policy.kl_estimator=k2"], ["policy.kl_estimator = k2", "policy.kl_coef = 0"]),
    (["reference.path=other"], ["reference.path = other", "policy.kl_coef = 0"]),
    (["policy.kl_coef=0.1", "reference.source=policy_base"], ["reference.source = policy_base", "lora.rank = 0"]),
    (
        ["policy.kl_coef=0.1", "reference.source=policy_base", "lora.rank=4", "reference.num_replicas=2"],
        ["reference.num_replicas = 2", "policy_base"],
    ),
    (["policy.clip_high=0.1"], ["policy.clip_high = 0.1"]),
    (["policy.dual_clip=3"], ["policy.dual_clip = 3.0"]),
    (["optimizer.warmup_steps=2", "optimizer.warmup_ratio=0.1"], ["warmup_steps = 2", "warmup_ratio = 0.1"]),
    (["policy.max_steps=0"], ["policy.max_steps = 0", "policy.sft_warmup_steps = 0"]),
    (["rollout.max_model_len=1000"], ["rollout.max_model_len = 1000", "= 1024", "= 256", "1280 or more"]),
    (["rollout.max_new_tokens=4"], ["rollout.min_length_limit = 8", "rollout.max_new_tokens = 4"]),
    (["data.min_ground_truth_tokens=9", "data.max_ground_truth_tokens=8"], ["= 9", "= 8"]),
    (["data.prompt_column=text", "data.ground_truth_column=text"], ["data.prompt_column = text", "the same column"]),
    (["data.chat_template=t.jinja"], ["data.chat_template = t.jinja", "data.messages_column = null"]),
    (["data.stride=4"], ["data.stride = 4", "data.mode = structured", "strided"]),
    (["data.pack_documents=true"], ["data.pack_documents = True", "data.mode = structured"]),
    (
        ["data.mode=strided", "data.sequence_length=15"],
        ["data.sequence_length = 15", "data.context_length = 8", "data.generate_max_len = 8", "16 or more"],
    ),
    (["data.mode=strided", "rollout.max_model_len=256"], ["= 256", "257 or more"]),
    (["data.mode=strided", "data.text_column=t", "data.messages_column=m"], ["= t", "data.messages_column"]),
    (["data.mode=strided", "data.text_column=t", "data.min_completion_prefix=2"], ["= 2", "data.context_length"]),
    (["data.mode=strided", "data.pack_documents=true", "model.attention=rows"], ["model.attention = rows", "sdpa"]),
    (["data.heldout_fraction=1"], ["data.heldout_fraction = 1"]),
    (["data.heldout_fraction=0"], ["evaluation.max_examples = 24", "data.heldout_fraction = 0"]),
    (["evaluation.max_examples=0", "evaluation.every_steps=2"], ["evaluation.every_steps = 2"]),
    (
        ["rollout.sync_every_steps=4", "evaluation.every_steps=10"],
        ["evaluation.every_steps = 10", "rollout.sync_every_steps = 4", "8 or 12"],
    ),
    (["checkpoint.keep_best=2"], ["checkpoint.keep_best = 2", "evaluation.every_steps = 0"]),
    (["features.layer_fractions=[0.5, 0.25, 0.5]"], ["names a depth twice", "[0.25, 0.5]"]),
    (["rollout.engine=transformers", "rollout.tensor_parallel_size=2"], ["rollout.tensor_parallel_size = 2"]),
    (["rollout.engine=transformers", "rollout.weight_transfer=nccl"], ["rollout.weight_transfer = nccl"]),
    (["deepspeed.offload_optimizer=true"], ["deepspeed.offload_optimizer = true", "deepspeed.zero_stage = 0"]),
]


@pytest.mark.parametrize(("flags", "texts"), REJECTED)
def test_rejected(problems, flags, texts):
    (problem,) = problems(*(f"--{flag}" for flag in flags))
    for text in texts:
        assert text in problem


@pytest.mark.parametrize(
    "flags",
    [
        ["rollout.samples_per_prompt=1", "reward.advantage=reinforce"],
        ["rollout.samples_per_prompt=2"],
        ["policy.rl_coef=0"],
        ["policy.loss=ppo", "policy.updates_per_batch=4", "policy.mini_batches=2", "policy.dual_clip=3"],
        ["policy.tis_cap=2"],
        ["policy.objective=sft", "rollout.temperature=0"],
        ["policy.objective=sft", "reward.alignment_coef=0", "reward.diversity_coef=0"],
        ["policy.kl_coef=0.1", "policy.kl_estimator=k2", "reference.path=other", "reference.num_replicas=2"],
        ["policy.kl_coef=0.1", "reference.source=policy_base", "lora.rank=4"],
        ["reward.alignment_coef=0", "reward.diversity_coef=0", "reward.function=f.py:g", "reward.function_coef=0.5"],
        ["policy.ema_decay=0.9", "policy.export_ema=true", "evaluation.use_ema=true"],
        ["policy.rl_coef=0", "rollout.temperature=0"],
        ["rollout.sync_every_steps=4", "evaluation.every_steps=12"],
        ["rollout.sync_every_steps=4", "evaluation.every_steps=10", "policy.objective=sft"],
        ["reward.alignment_coef=0"],
        ["policy.max_steps=3", "optimizer.warmup_steps=4", "policy.sft_warmup_steps=1"],
        ["policy.max_steps=0", "policy.sft_warmup_steps=1"],
        ["optimizer.warmup_steps=500"],
        ["rollout.max_model_len=1280"],
        ["rollout.max_new_tokens=8"],
        ["data.chat_template=t.jinja", "data.apply_chat_template=true"],
        ["data.chat_template=t.jinja", "data.messages_column=messages"],
        ["data.heldout_fraction=0", "evaluation.max_examples=0"],
        ["deepspeed.offload_optimizer=true", "deepspeed.zero_stage=2"],
        ["rollout.engine=transformers", "rollout.weight_transfer=object_store"],
    ],
)
def test_accepted(problems, flags):
    assert problems(*(f"--{flag}" for flag in flags)) == ()


def test_all_broken_rules_come_at_once(problems):
    assert len(problems("--rollout.samples_per_prompt=1", "--rollout.temperature=0", "--data.heldout_fraction=1")) == 3


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ([], []),
        (["rollout.samples_per_prompt=1", "reward.advantage=reinforce"], ["diversity term is 0"]),
        (["rollout.top_p=0.9"], ["rollout.top_p = 0.9"]),
        (["rollout.sync_every_steps=2"], ["older weights"]),
        (["policy.loss=ppo"], ["policy.loss = ppo"]),
        (["policy.kl_coef=0.1", "policy.kl_estimator=k1"], ["policy.kl_estimator = k1"]),
        (["policy.loss=ppo", "policy.updates_per_batch=2"], []),
        (["optimizer.min_lr_ratio=0.1"], ["optimizer.min_lr_ratio = 0.1"]),
    ],
)
def test_notes(write_config, flags, texts):
    notes = list_notes(load_config(write_config(), [f"--{flag}" for flag in flags]))
    assert len(notes) == len(texts)
    for note, text in zip(notes, texts, strict=True):
        assert text in note


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (None, None)),
        (["policy.loss=ppo"], (0.2, 0.2)),
        (["policy.loss=gspo"], (3e-4, 4e-4)),
        (["policy.loss=gspo", "policy.clip_high=0.01"], (3e-4, 0.01)),
    ],
)
def test_clip_range_follows_the_loss(write_config, flags, expected):
    policy = load_config(write_config(), [f"--{flag}" for flag in flags]).policy
    assert (policy.clip_low, policy.clip_high) == expected
