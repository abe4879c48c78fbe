"""Files and flags become a checked configuration; every fault is named with key, value and what is allowed."""

import pytest

from openrlhf_ebft.config import ConfigError, EBFTConfig, dump_config, load_config
from openrlhf_ebft.config.durability import CheckpointConfig
from openrlhf_ebft.config.keys import iterate_fields
from tests.config.conftest import MINIMAL


def problems(path, *flags):
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags)
    return caught.value.problems


def test_defaults_are_the_papers(write_config):
    config = load_config(write_config())
    assert (config.rollout.samples_per_prompt, config.rollout.temperature) == (4, 0.6)
    assert (config.reward.alignment_coef, config.reward.diversity_coef, config.reward.advantage) == (1.0, 1.0, "rloo")
    assert config.features.layer_fractions == (0.25, 0.5, 0.75)
    assert config.features.whitening == "feature"
    assert (config.optimizer.learning_rate, config.policy.ce_coef) == (1e-6, 0.03)


@pytest.mark.parametrize(("mode", "method"), [("structured", "completion_mean"), ("strided", "last_token")])
def test_pooling_is_resolved_by_mode_and_shown(write_config, mode, method):
    config = load_config(write_config(), [f"--data.mode={mode}"])
    assert config.features.embed_method == method
    assert f"embed_method: {method}" in dump_config(config)
    chosen = load_config(write_config(), [f"--data.mode={mode}", "--features.embed_method=mean_pooling"])
    assert chosen.features.embed_method == "mean_pooling"


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        (["--data.mode=strided"], "transformers"),
        (["--data.mode=structured"], "vllm"),
        (["--data.mode=strided", "--rollout.tensor_parallel_size=2"], "vllm"),
        (["--data.mode=strided", "--rollout.weight_transfer=nccl"], "vllm"),
    ],
)
def test_engine_auto_is_resolved(write_config, flags, engine):
    config = load_config(write_config(), [*flags, "--rollout.engine=auto"])
    assert config.rollout.engine == engine
    assert f"engine: {engine}" in dump_config(config)


def test_limit_of_a_completion_by_mode(write_config):
    flags = ["--data.generate_max_len=5", "--rollout.max_new_tokens=77"]
    assert load_config(write_config(), ["--data.mode=strided", *flags]).completion_limit == 5
    assert load_config(write_config(), flags[1:]).completion_limit == 77


def test_flags_win_over_the_file_in_both_spellings(write_config):
    path = write_config(MINIMAL + "rollout: {temperature: 0.9, top_k: 5}\n")
    config = load_config(path, ["--rollout.temperature", "0.7", "--optimizer.learning_rate=1e-5", "--seed", "3"])
    assert (config.rollout.temperature, config.rollout.top_k) == (0.7, 5)
    assert (config.optimizer.learning_rate, config.seed) == (1e-5, 3)


def test_flag_values_are_yaml_and_text_stays_text(write_config):
    flags = ["--features.layer_fractions=[0.5, 1]", "--policy.max_steps", "null", "--data.path", "2024", "--name=007"]
    config = load_config(write_config(), [*flags, "--model.tokenizer", "null", "--data.shuffle", "false"])
    assert config.features.layer_fractions == (0.5, 1.0)
    assert (config.policy.max_steps, config.data.path, config.name) == (None, "2024", "007")
    assert (config.model.tokenizer, config.data.shuffle) == (None, False)


def test_empty_sections_mean_defaults(write_config):
    assert load_config(write_config(MINIMAL + "rollout:\n  # top_k: 3\n")).rollout.top_k == 0


def test_dump_loads_back_equal(write_config):
    flags = ["--optimizer.learning_rate=3e-6", "--data.prompt_column", "on", "--features.layer_fractions=[1e-1]"]
    config = load_config(write_config(), [*flags, "--model.tokenizer=1e5"])
    again = load_config(write_config(dump_config(config), "again.yaml"))
    assert again == config
    assert dump_config(again) == dump_config(config)


def test_dump_shows_every_key(write_config):
    lines = dump_config(load_config(write_config())).splitlines()
    names = [line.strip().partition(":")[0] for line in lines]
    assert all(path[-1] in names for path, _ in iterate_fields(EBFTConfig))


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("rollout:\n  temprature: 1", "rollout.temperature"),
        ("rollouts:\n  top_k: 1", "rollout"),
        ("policy:\n  temperature: 1", "rollout.temperature"),
        ("policy:\n  max-steps: 1", "policy.max_steps"),
        ("learning_rate: 1", "optimizer.learning_rate"),
        ("reward:\n  diversity_coeff: 1", "reward.diversity_coef"),
        ("optimizer:\n  lerning_rate: 1", "optimizer.learning_rate"),
    ],
)
def test_unknown_keys_name_the_nearest_and_the_line(write_config, key, right):
    (problem,) = problems(write_config(MINIMAL + key + "\n"))
    line = 6 if right == "rollout" else 6 + key.count("\n")
    assert f"did you mean {right}?" in problem
    assert f"run.yaml, line {line})" in problem


@pytest.mark.parametrize(
    ("flag", "right"),
    [
        ("--rollout.temprature=1", "--rollout.temperature"),
        ("--temperature=1", "--rollout.temperature"),
        ("--rollout.top-k=1", "--rollout.top_k"),
        ("--rolout.top_k=1", "--rollout.top_k"),
    ],
)
def test_unknown_flags_name_the_nearest(write_config, flag, right):
    (problem,) = problems(write_config(), flag)
    assert f"did you mean {right}?" in problem


def test_far_off_keys_list_what_exists(write_config):
    (problem,) = problems(write_config(MINIMAL + "checkpoint:\n  zzz: 1\n"))
    known = problem.partition("known here: ")[2].partition(" (")[0].split(", ")
    assert known == list(CheckpointConfig.model_fields)


def test_all_problems_come_at_once(write_config):
    assert len(problems(write_config(MINIMAL + "zzz: 1\n"), "--yyy=1", "--seed", "--rollout=1")) == 4


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--rollout.engine=vlm", "rollout.engine = 'vlm': must be one of vllm, transformers, auto; did you mean vllm?"),
        ("--rollout.top_p=1.5", "rollout.top_p = 1.5: must be at most 1.0"),
        ("--rollout.temperature=-1", "rollout.temperature = -1: must be at least 0.0"),
        ("--rollout.temperature=.nan", "rollout.temperature = nan: must be a finite number"),
        ("--rollout.samples_per_prompt=0", "rollout.samples_per_prompt = 0: must be at least 1"),
        ("--rollout.samples_per_prompt=2.5", "rollout.samples_per_prompt = 2.5: must be a whole number"),
        ("--rollout.samples_per_prompt=four", "rollout.samples_per_prompt = 'four': must be a whole number"),
        ("--rollout.samples_per_prompt=null", "rollout.samples_per_prompt = null: must be a whole number"),
        ("--policy.num_ranks=true", "policy.num_ranks = true: must not be true"),
        ("--deepspeed.zero_stage=4", "deepspeed.zero_stage = 4: must be one of 0, 1, 2, 3"),
        ("--data.shuffle=maybe", "data.shuffle = 'maybe': must be true or false"),
        ("--features.layer_fractions=[]", "features.layer_fractions = []: needs 1 or more entries"),
        ("--features.layer_fractions=0.5", "features.layer_fractions = 0.5: must be a list"),
        ("--features.layer_fractions=[0.5, 2]", "features.layer_fractions.1 = 2: must be at most 1.0"),
        ("--optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 = 1.0: must be below 1.0"),
        ("--name=a b", "name = 'a b': must match"),
        ("--name=..", "name = '..': must match"),
        ("--data.path=", "data.path = '': must not be empty"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(write_config, flag, message):
    (problem,) = problems(write_config(), flag)
    assert problem.startswith(message)
    assert f"(flag {flag.partition('=')[0]})" in problem


def test_errors_of_the_file_name_the_line(write_config):
    (problem,) = problems(write_config(MINIMAL + "rollout:\n  top_k: -1\n"))
    assert problem.startswith("rollout.top_k = -1: must be at least 0 (")
    assert problem.endswith("run.yaml, line 7)")


def test_missing_keys_say_what_they_are(write_config):
    found = problems(write_config("name: x\nmodel:\n"))
    assert found == (
        "model.path: missing, and it has no default (local folder, hub name, or a .gguf file of the initial policy)",
        "data: this section is missing and has keys without a default",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1\n- 2\n", "must hold sections such as `model:`, but holds a list"),
        (b"name: \xff\n", "not UTF-8 text: byte 0xff at 6"),
        (MINIMAL + "data: {path: b}\n", "data stands twice: line 4 and line 6"),
        (MINIMAL + "rollout: 3\n", "rollout = 3: must be a section"),
        ("null: 2\n" + MINIMAL, "None: unknown key"),
        (MINIMAL + "rollout: &a {zzz: 1}\nreward: {<<: *a}\n", "rollout.zzz: unknown key"),
        (MINIMAL + "rollout: &a {timeout_s: true}\nfeatures: {<<: *a}\n", "rollout.timeout_s = true: must not be true"),
    ],
)
def test_files_that_are_no_configuration(write_config, content, message):
    assert problems(write_config(content))[0].startswith(message)


def test_missing_file_and_folder(tmp_path):
    assert problems(tmp_path / "none.yaml") == ("no such file",)
    assert problems(tmp_path)[0].startswith("cannot be read")


def test_flag_given_twice_is_an_error(write_config):
    assert problems(write_config(), "--seed=1", "--seed=2") == ("--seed is given twice; keep one",)
