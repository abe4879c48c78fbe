"""The lora section: how targets are written, and the rules between it and other sections."""

import pytest

from openrlhf_ebft.config import ConfigError, load_config


@pytest.fixture
def problems(write_config):
    def check(*flags):
        try:
            load_config(write_config(), [f"--{flag}" for flag in flags])
        except ConfigError as error:
            return error.problems
        return ()

    return check


@pytest.mark.parametrize(
    ("flag", "targets"),
    [
        ("lora.targets=all-linear", ("all-linear",)),
        ("lora.targets=q_proj", ("q_proj",)),
        ("lora.targets=[q_proj, v_proj]", ("q_proj", "v_proj")),
    ],
)
def test_targets_are_one_name_or_a_list(write_config, flag, targets):
    lora = load_config(write_config(), ["--lora.rank=2", f"--{flag}"]).lora
    assert lora.targets == targets
    assert lora.is_on


def test_scaling(write_config):
    flags = ["--lora.rank=16", "--lora.alpha=32"]
    assert load_config(write_config(), flags).lora.scaling == 2
    assert load_config(write_config(), [*flags, "--lora.rslora=true"]).lora.scaling == 8


REJECTED = [
    (["lora.rank=2", "lora.targets=[]"], ["lora.targets", "1 or more"]),
    (["lora.rank=2", "lora.dropout=1"], ["lora.dropout"]),
    (["lora.alpha=8"], ["lora.alpha = 8 has no effect with lora.rank = 0", "set lora.rank to 1 or more (16)"]),
    (["lora.targets=q_proj"], ["lora.targets = ['q_proj'] has no effect"]),
    (["lora.rank=513", "lora.sync=adapter"], ["lora.rank = 513", "up to rank 512", "lora.sync to merged"]),
    (
        ["lora.rank=8", "lora.sync=adapter", "rollout.weight_transfer=nccl"],
        ["rollout.weight_transfer = nccl", "lora.sync = adapter", "object_store"],
    ),
    (["features.source=policy_base"], ["features.source = policy_base", "lora.rank = 0", "separate"]),
    (["lora.rank=8", "features.source=policy_base", "features.path=other"], ["features.path = other", "model.path = "]),
    (
        ["lora.rank=8", "features.source=policy_base", "features.dtype=float16"],
        ["features.dtype = float16", "model.dtype = bfloat16"],
    ),
    (
        ["lora.rank=8", "features.source=policy_base", "features.num_replicas=2"],
        ["features.num_replicas = 2", "1 trainer ranks"],
    ),
    (
        ["lora.rank=8", "features.source=policy_base", "deepspeed.zero_stage=3", "model.attention=rows"],
        ["deepspeed.zero_stage = 3", "model.attention = rows", "sdpa"],
    ),
]


@pytest.mark.parametrize(("flags", "texts"), REJECTED)
def test_rejected(problems, flags, texts):
    (problem,) = problems(*flags)
    for text in texts:
        assert text in problem


@pytest.mark.parametrize(
    "flags",
    [
        ["lora.rank=512", "lora.sync=adapter"],
        ["lora.rank=513"],
        ["lora.rank=513", "lora.sync=adapter", "rollout.engine=transformers"],
        ["lora.rank=8", "lora.sync=adapter", "rollout.weight_transfer=object_store"],
        ["lora.rank=8", "rollout.weight_transfer=nccl"],
        ["lora.rank=8", "features.source=policy_base", "features.dtype=bfloat16"],
        ["lora.rank=8", "features.source=policy_base", "deepspeed.zero_stage=3"],
        ["lora.rank=8", "features.source=policy_base", "deepspeed.zero_stage=2", "model.attention=rows"],
    ],
)
def test_accepted(problems, flags):
    assert problems(*flags) == ()
