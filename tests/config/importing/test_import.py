"""Foreign configurations: every key accounted for, known differences in convention, and a result that can run."""

from pathlib import Path

import pytest
import yaml

from openrlhf_ebft.cli.main import main
from openrlhf_ebft.config import ConfigError, load_config
from openrlhf_ebft.config.durability import CheckpointConfig
from openrlhf_ebft.config.evaluation import EvaluationConfig
from openrlhf_ebft.config.importing import import_config
from openrlhf_ebft.config.importing.authors_keys import DROPPED, SAME
from openrlhf_ebft.config.keys import find_field
from openrlhf_ebft.config.sections import EBFTConfig

HERE = Path(__file__).parent
AUTHORS, STRUCTURED, STRIDED = (HERE / f"{n}.yaml" for n in ("authors_code", "axolotl_structured", "axolotl_strided"))


def write(tmp_path, source, **changes):
    """A copy of a file with keys changed; None removes one."""
    data = yaml.safe_load(source.read_text())
    for key, value in changes.items():
        section = data
        *path, name = key.split("__")
        for part in path:
            section = section[part]
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    path = tmp_path / "foreign.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def flat_keys(path):
    data = yaml.safe_load(path.read_text())
    inner = {f"{s}.{k}" for s in ("ebft", "trl", "vllm") for k in data.get(s, {})}
    sweep = {key for entry in data.get("sweep", []) for key in entry}
    return {key for key in data if key not in ("ebft", "trl", "vllm", "sweep")} | inner | sweep


@pytest.mark.parametrize("path", [AUTHORS, STRUCTURED, STRIDED], ids=lambda path: path.stem)
def test_every_key_is_accounted_for_once_and_targets_exist(path):
    for imported in import_config(path):
        keys = [note.key for note in imported.notes]
        assert flat_keys(path) <= set(keys)
        assert len(keys) == len(set(keys))
        for note in imported.notes:
            assert note.action == "dropped" or note.targets
            assert note.action == "mapped" or note.why
            for target in note.targets:
                assert find_field(EBFTConfig, tuple(target.partition(" = ")[0].split("."))) is not None


def test_tables_name_keys_of_this_version():
    for path in SAME.values():
        assert find_field(EBFTConfig, tuple(path.split("."))) is not None, path
    assert not set(SAME) & set(DROPPED)


def test_sweep_becomes_every_combination():
    configs = import_config(AUTHORS)
    assert len(configs) == 2 * 3 * 3 + 3 * 3
    assert len({imported.name for imported in configs}) == len(configs)
    points = {
        (c.config.features.whitening, c.config.policy.ce_coef, c.config.reward.diversity_coef, c.config.policy.epochs)
        for c in configs
    }
    grid = [(ce, diversity) for ce in (0.0, 0.03, 0.1) for diversity in (0.0, 0.5, 1.0)]
    expected = {(w, *point, 2) for w in ("sample", "none") for point in grid} | {
        ("sample", *point, 1) for point in grid
    }
    assert points == expected
    assert {c.config.model.path for c in configs} == {"some/base-model", "some/warm-start"}
    assert {c.config.features.path for c in configs} == {"some/base-model"}


def test_authors_values():
    config = import_config(AUTHORS)[0].config
    assert (config.data.mode, config.data.stride, config.data.context_length, config.data.generate_max_len) == (
        "strided", 8, 8, 8,
    )  # fmt: skip
    assert (config.data.prompt_column, config.data.ground_truth_column) == ("question", "answer")
    assert config.data.sequence_length == 1024
    assert config.policy.prompts_per_step == 16  # 64 samples of 4 a prompt
    assert config.policy.micro_batch_size == 2  # 8 samples of 4 a prompt
    assert (config.policy.updates_per_batch, config.policy.loss) == (1, "reinforce")
    assert config.features.layer_fractions == (0.25, 0.5, 0.75)
    assert (config.features.normalize, config.features.embed_method) == ("joint", "last_token")
    assert (config.optimizer.schedule, config.optimizer.warmup_ratio, config.optimizer.learning_rate) == (
        "constant", 0.03, 1e-6,
    )  # fmt: skip
    assert (config.policy.ema_decay, config.policy.export_ema) == (0.9, True)
    assert (config.seed, config.rollout.temperature, config.rollout.samples_per_prompt) == (43, 0.6, 4)
    assert config.checkpoint.every_steps == 0  # -1 there
    assert config.logging.wandb_project is None  # a placeholder


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"embed_method": "mean_pooling"}, "features.embed_method", "completion_mean"),
        ({"embed_method": "concat"}, "features.embed_method", "concat_tokens"),
        ({"hidden_state_method": "stack"}, "features.normalize", "per_layer"),
        ({"hidden_state_method": "last_only"}, "features.layer_fractions", [1.0]),
        ({"lr_scheduler": "cosine_with_min_lr"}, "optimizer.min_lr_ratio", 0.1),
        ({"stride": None}, "data.stride", 8),  # generate_max_len
        ({"temperature": None, "eval_temperature": None}, "rollout.temperature", 1.0),  # the default there, not ours
        ({"seed": None}, "seed", 42),
        ({"init_kl_coef": None}, "policy.kl_coef", 0.01),
        ({"rollout_batch_size": 64}, "policy.mini_batches", 4),
        ({"rollout_batch_size": 64}, "policy.loss", "ppo"),
        ({"rollout_batch_size": 64, "eps_clip": 0.1}, "policy.clip_low", 0.1),
        ({"rollout_batch_size": 64, "dual_clip": 3.0}, "policy.dual_clip", 3.0),
        ({"max_epochs": 2}, "policy.updates_per_batch", 2),
        ({"actor_num_gpus_per_node": 8}, "policy.num_ranks", 8),
        ({"actor_num_gpus_per_node": 5}, "policy.num_ranks", 4),  # 16 prompts do not divide into 5
        ({"advantage_estimator": "reinforce_baseline"}, "reward.advantage", "rloo_simple"),
        ({"wandb_project": "mine"}, "logging.wandb_project", "mine"),
        ({"document_masking": True}, "data.pack_documents", True),
    ],
)
def test_authors_conventions(tmp_path, changes, key, value):
    imported = import_config(write(tmp_path, AUTHORS, **changes))[0]
    place = imported.data
    for part in key.split("."):
        place = place[part]
    assert place == value


@pytest.mark.parametrize("method", ["middle_concat", "layer_5", "mean"])
def test_layers_that_depend_on_the_model_are_dropped_with_a_reason(tmp_path, method):
    (note,) = [
        n for n in import_config(write(tmp_path, AUTHORS, hidden_state_method=method))[0].notes
        if n.key == "hidden_state_method"
    ]  # fmt: skip
    assert note.action == "dropped"
    assert "features.layer_fractions" in note.why


def test_keys_without_effect_there_are_dropped(tmp_path):
    """One update a batch clips nothing, and a range of two numbers is no sweep of two runs."""
    configs = import_config(write(tmp_path, AUTHORS, dual_clip=3.0, dynamic_filtering_reward_range=[0, 1]))
    assert len(configs) == len(import_config(AUTHORS))
    actions = {note.key: note.action for note in configs[0].notes}
    assert (actions["dual_clip"], actions["dynamic_filtering_reward_range"]) == ("dropped", "dropped")


def test_an_api_key_is_neither_copied_nor_shown(tmp_path, capsys):
    path = write(tmp_path, AUTHORS, use_wandb="abcdef0123456789", wandb_api_key="abcdef0123456789")
    assert main(["import-config", str(path)]) == 0
    shown = capsys.readouterr()
    assert "abcdef0123456789" not in shown.out + shown.err
    assert "use_wandb = (not shown)" in shown.err and "wandb_api_key = (not shown)" in shown.err


def test_references_stand_for_values_alone_and_inside_texts(tmp_path):
    path = write(
        tmp_path, AUTHORS, save_path="runs/g${generate_max_len}-t${eval_temperature}", stride="${generate_max_len}"
    )
    imported = import_config(path)[0]
    assert imported.name.startswith("g8-t0.6-set1")
    assert imported.config.data.stride == 8


def test_axolotl_values():
    config = import_config(STRUCTURED)[0].config
    assert config.data.mode == "structured"
    assert (config.features.whitening, config.features.normalize) == ("none", "none")
    assert config.reward.advantage == "group_norm"
    assert config.policy.prompts_per_step == 2  # 2 x 4 samples of 4 a prompt
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 32, ("all-linear",))
    assert config.evaluation.max_examples == 0
    assert config.data.split == "train[:500]"
    strided = import_config(STRIDED)[0].config
    assert (strided.features.whitening, strided.features.normalize) == ("feature", "per_layer")
    assert strided.features.embed_method == "completion_mean"
    assert strided.policy.prompts_per_step == 4
    assert strided.deepspeed.zero_stage == 3
    assert strided.data.text_column == "text"
    assert strided.data.heldout_fraction == 0.02


def test_axolotl_defaults_are_its_own(tmp_path):
    imported = import_config(write(tmp_path, STRUCTURED, trl__temperature=None, trl__scale_rewards=False))[0]
    assert imported.config.rollout.temperature == 1.0
    assert imported.config.reward.advantage == "dr_grpo"


@pytest.mark.parametrize(("schedule", "action"), [("cosine", "mapped"), ("constant", "dropped")])
def test_axolotl_last_learning_rate(tmp_path, schedule, action):
    imported = import_config(write(tmp_path, STRIDED, lr_scheduler=schedule, cosine_min_lr_ratio=0.1))[0]
    assert {note.action for note in imported.notes if note.key == "cosine_min_lr_ratio"} == {action}
    assert imported.config.optimizer.min_lr_ratio == (0.1 if action == "mapped" else 0.0)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (AUTHORS, {"save_steps": "often"}, "save_steps = 'often': must be a whole number"),
        (AUTHORS, {"n_samples_per_prompt": 0}, "n_samples_per_prompt = 0: must be a whole number of at least 1"),
        (AUTHORS, {"actor_num_gpus_per_node": 1.5}, "actor_num_gpus_per_node = 1.5: must be a whole number"),
        (AUTHORS, {"init_kl_coef": {"a": 1}}, "init_kl_coef = {'a': 1}: must be a number"),
        (AUTHORS, {"use_whitening": "maybe"}, "use_whitening = 'maybe': must be true or false"),
        (AUTHORS, {"max_epochs": 2, "eps_clip_low_high": [0.1]}, "eps_clip_low_high = [0.1]: must be a list of two"),
        (STRUCTURED, {"micro_batch_size": float("inf")}, "micro_batch_size = inf: must be a whole number"),
        (STRUCTURED, {"datasets": "data.jsonl"}, "datasets = 'data.jsonl': must be a list of data sets"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, source, changes, message):
    with pytest.raises(ConfigError) as caught:
        import_config(write(tmp_path, source, **changes))
    assert message in str(caught.value)


def test_plain_words_are_booleans_as_they_are_there(tmp_path):
    path = write(tmp_path, AUTHORS)
    path.write_text(path.read_text().replace("use_whitening: true", "use_whitening: no"))
    assert import_config(path)[-1].config.features.whitening == "none"


def test_axolotl_words_beside_booleans(tmp_path):
    config = import_config(write(tmp_path, STRUCTURED, bf16="full", gradient_checkpointing="offload"))[0].config
    assert (config.model.dtype, config.policy.gradient_checkpointing) == ("bfloat16", True)
    assert not import_config(write(tmp_path, STRUCTURED, gradient_checkpointing="no"))[
        0
    ].config.policy.gradient_checkpointing


def test_null_means_the_default(tmp_path):
    path = tmp_path / "foreign.yaml"
    text = AUTHORS.read_text().replace("save_steps: -1", "save_steps: null")
    path.write_text(text.replace("eval_max_samples: 128", "eval_max_samples: null"))
    config = import_config(path)[0].config
    assert config.checkpoint.every_steps == CheckpointConfig().every_steps
    assert config.evaluation.max_examples == EvaluationConfig().max_examples


def test_unknown_keys_are_listed_and_dropped(tmp_path):
    for source in (AUTHORS, STRUCTURED):
        notes = import_config(write(tmp_path, source, some_new_key=3))[0].notes
        (note,) = [note for note in notes if note.key == "some_new_key"]
        assert (note.action, note.value) == ("dropped", 3)
        assert "not known" in note.why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "neither the EBFT authors' flat keys"),
        ("- 1\n", "holds no keys"),
        ("pretrain: m\nsweep: 3\n", "sweep: must be a list"),
        ("pretrain: m\nsweep:\n  - seed: []\n", "seed: an empty list"),
        ("pretrain: m\ntemperature: ${nothing}\n", "no key nothing"),
        ("pretrain: m\nn_samples_per_prompt: 4\n", r"prompt_data: missing; it is data\.path here"),
        ("prompt_data: d.jsonl\nn_samples_per_prompt: 4\n", r"pretrain: missing; it is model\.path here"),
        ("rl: ebft\ndatasets: [{path: d.jsonl}]\n", r"base_model: missing; it is model\.path here"),
        ("rl: ebft\nbase_model: m\n", r"datasets: missing; it is data\.path here"),
    ],
)
def test_files_that_cannot_be_translated(tmp_path, text, message):
    path = tmp_path / "foreign.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_config(path)


def test_command_writes_files_that_load(tmp_path, capsys):
    assert main(["import-config", str(AUTHORS), "--out", str(tmp_path / "sweep")]) == 0
    printed = capsys.readouterr()
    files = printed.out.split()
    assert len(files) == 27
    for file in files:
        assert load_config(file).name == Path(file).stem
    assert "mapped (" in printed.err
    assert "dropped (" in printed.err
    assert main(["import-config", str(STRUCTURED), "--out", str(tmp_path / "one.yaml")]) == 0
    assert load_config(tmp_path / "one.yaml") == import_config(STRUCTURED)[0].config
    assert main(["import-config", str(STRUCTURED), "--out", str(tmp_path / "one.yaml")]) == 2
    assert main(["import-config", str(tmp_path / "none.yaml")]) == 2
