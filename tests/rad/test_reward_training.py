"""The prefix loss, training, saving, resuming, and the held-out report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.rad import RAD, load_sequence_classifier
from openrlhf_ebft.rad.reward_checkpoint import RewardCheckpoints
from openrlhf_ebft.rad.reward_examples import RewardExamples, batch_indices
from openrlhf_ebft.rad.reward_loss import prefix_reward_loss, prefix_rewards
from openrlhf_ebft.rad.reward_report import markdown_table, plot_errors, prefix_errors, spearman
from openrlhf_ebft.rad.reward_training import (
    HEAD_SCALE,
    PrefixRewardTrainSpec,
    RewardTrainer,
    build_reward_model,
    train_prefix_reward_model,
)
from tests.rad.conftest import configs, encoder_configs, make_classifier, make_lm, make_tokenizer

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "prefix_reward_loss.npz")


def save_backbone(folder, name: str = "llama") -> str:
    make_lm(configs()[name]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def task(count: int = 96) -> tuple[list[str], list[float]]:
    """Texts of random words; the label is 1 if the first word is above w25, else 0."""
    generator = torch.Generator().manual_seed(11)
    texts, labels = [], []
    for _ in range(count):
        ids = torch.randint(3, 48, (int(torch.randint(2, 9, (1,), generator=generator)),), generator=generator)
        texts.append(" ".join(f"w{int(i)}" for i in ids))
        labels.append(float(ids[0] > 25))
    return texts, labels


@pytest.mark.parametrize("side", ["", "_left"])
def test_golden_loss(side):
    predictions = torch.tensor(GOLDEN["predictions" + side], requires_grad=True)
    mask = torch.tensor(GOLDEN["attention_mask" + side])
    loss = prefix_reward_loss(predictions, torch.tensor(GOLDEN["labels"]), mask)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(GOLDEN["loss" + side]), rel=1e-6)
    loss.backward()
    assert (predictions.grad[mask == 0] == 0).all()


def test_loss_of_empty_batches_and_nan_padding():
    predictions = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = prefix_reward_loss(predictions, torch.tensor([0.0, 1.0]), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0 and (predictions.grad == 0).all()
    mixed = torch.tensor([[0.2, float("nan")]], requires_grad=True)
    loss = prefix_reward_loss(mixed, torch.tensor([1.0]), torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.item() == pytest.approx(0.64) and mixed.grad[0].tolist() == pytest.approx([-1.6, 0.0])


def test_loss_in_float32_from_bfloat16_and_wrong_shapes():
    predictions = torch.rand(2, 300).bfloat16()
    labels, mask = torch.tensor([0.7, 0.2]).bfloat16(), torch.ones(2, 300)
    torch.testing.assert_close(
        prefix_reward_loss(predictions, labels, mask), prefix_reward_loss(predictions.float(), labels.float(), mask)
    )
    with pytest.raises(ValueError, match=r"predictions \(2, 300\), labels \(3,\)"):
        prefix_reward_loss(predictions, torch.zeros(3), mask)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_prefix_rewards_are_scores_of_prefixes(name):
    model = make_classifier(configs()[name])
    rows = [[3, 4, 5, 6], [7, 8]]
    for ids, mask in (
        ([[3, 4, 5, 6], [7, 8, 1, 1]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ([[3, 4, 5, 6], [1, 1, 7, 8]], [[1, 1, 1, 1], [0, 0, 1, 1]]),
    ):
        mask = torch.tensor(mask)
        with torch.no_grad():
            rewards = prefix_rewards(model, torch.tensor(ids), mask)
        for number, row in enumerate(rows):
            got = rewards[number][mask[number] == 1]
            for length in range(1, len(row) + 1):
                with torch.no_grad():
                    hidden = getattr(model, model.base_model_prefix)(torch.tensor([row[:length]]))[0]
                    want = model.score(hidden[0, -1]).sigmoid()[0]
                assert got[length - 1].item() == pytest.approx(float(want), abs=1e-5)


def test_rewards_need_a_decoder_with_one_output():
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="decoder-only"):
        prefix_rewards(make_classifier(encoder_configs()["bert"]), ids, torch.ones_like(ids))
    with pytest.raises(ValueError, match="has 1 output.* has 2"):
        prefix_rewards(make_classifier(configs()["llama"], labels=2), ids, torch.ones_like(ids))


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["w3"], [0.1, 0.2], "1 texts but 2 labels"),
        ([], [], "no examples"),
        (["w3", "  "], [0.1, 0.2], "example 1 has an empty text"),
        (["w3", "w4"], [0.1, 1.2], r"example 1 has label 1.2; labels must lie in \[0, 1\]"),
        (["w3"], [float("nan")], "example 0 has label nan"),
        (["w3"], ["0.5"], "example 0 has label '0.5'"),
        (["w3", "w4"], [1, None], "example 1 has label None"),
        ("w3", [0.5, 0.5], "texts must be a list of texts"),
    ],
)
def test_bad_examples_are_named_before_the_backbone_is_loaded(texts, labels, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_prefix_reward_model(tmp_path / "no-backbone", texts, labels, tmp_path / "out", device="cpu")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 1.5}, "epochs must be a whole number, at least 1, got 1.5"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": "1e-5"}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        PrefixRewardTrainSpec(**setting)


def test_defaults():
    assert PrefixRewardTrainSpec() == PrefixRewardTrainSpec(64, 64, 1, 1e-5, 0.01, 0, 50)


def test_every_epoch_holds_every_example_once():
    for epoch in range(3):
        seen = [i for number in range(4) for i in batch_indices(10, 3, seed=5, step=4 * epoch + number)]
        assert sorted(seen) == list(range(10))
    assert batch_indices(10, 3, 5, 0) != batch_indices(10, 3, 5, 4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "granite"])
def test_training_learns_saves_and_steers(name, tmp_path):
    backbone = save_backbone(tmp_path / "backbone", name)
    texts, labels = task()
    losses: list[float] = []
    spec = PrefixRewardTrainSpec(max_length=8, batch_size=16, epochs=12, learning_rate=3e-3)
    output = train_prefix_reward_model(
        backbone, texts, labels, tmp_path / "out", spec=spec, device="cpu", on_step=lambda s: losses.append(s.loss)
    )
    assert output == tmp_path / "out"
    assert losses[0] == pytest.approx(0.25, abs=0.02), "a head scaled by 0.01 starts at 0.5"
    assert np.mean(losses[-6:]) < 0.17, "dropout is on while GPT-2 trains"
    model, tokenizer = load_sequence_classifier(output)
    assert model.config.num_labels == 1
    errors = prefix_errors(model, RewardExamples(tokenizer, texts, labels, 8))
    assert errors[-1].mse < 0.08 and errors[0].length == 1 and errors[0].examples == len(texts)
    lm = make_lm(configs()["llama"])
    rad = RAD(beta=20.0, reward_model_id=str(output), score_transform="sigmoid", verify=True)
    rad.steer(lm, tokenizer)
    assert rad.scoring_path == "cached"
    prompt = torch.tensor([[3, 4]])
    lm.generate(prompt, max_new_tokens=4, logits_processor=rad.get_logits_processors(prompt, {}), pad_token_id=1)


def test_head_starts_small_and_schedule_is_linear(tmp_path):
    model, tokenizer = build_reward_model(save_backbone(tmp_path), seed=0)
    assert 0 < float(model.score.weight.detach().abs().max()) <= HEAD_SCALE
    texts, labels = task(8)
    trainer = RewardTrainer(model, RewardExamples(tokenizer, texts, labels, 8), PrefixRewardTrainSpec(batch_size=2))
    rates = [trainer.train_step().learning_rate for _ in range(4)]
    assert rates == pytest.approx([1e-5, 0.75e-5, 0.5e-5, 0.25e-5])


def test_resumed_run_equals_uninterrupted(tmp_path):
    backbone = save_backbone(tmp_path / "backbone", "gpt2")
    texts, labels = task(40)
    spec = PrefixRewardTrainSpec(max_length=8, batch_size=8, epochs=2, learning_rate=1e-3)

    class Stop(Exception):
        pass

    def stop(step):
        if step.step == 7:
            raise Stop

    train_prefix_reward_model(backbone, texts, labels, tmp_path / "whole", spec=spec, device="cpu")
    checkpoints = RewardCheckpoints(tmp_path / "ckpt", every=3, resume=True)
    with pytest.raises(Stop):
        train_prefix_reward_model(
            backbone, texts, labels, tmp_path / "x", spec=spec, device="cpu", checkpoints=checkpoints, on_step=stop
        )
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step-6"]
    steps: list[int] = []
    train_prefix_reward_model(
        backbone,
        texts,
        labels,
        tmp_path / "resumed",
        spec=spec,
        device="cpu",
        checkpoints=checkpoints,
        on_step=lambda s: steps.append(s.step),
    )
    assert steps == [7, 8, 9, 10]
    whole, _ = load_sequence_classifier(tmp_path / "whole")
    resumed, _ = load_sequence_classifier(tmp_path / "resumed")
    for (name, first), second in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(first, second), name
    with pytest.raises(ValueError, match=r"other settings: epochs 2 -> 3"):
        train_prefix_reward_model(
            backbone,
            texts,
            labels,
            tmp_path / "y",
            spec=PrefixRewardTrainSpec(max_length=8, batch_size=8, epochs=3, learning_rate=1e-3),
            device="cpu",
            checkpoints=checkpoints,
        )
    with pytest.raises(ValueError, match="other examples"):
        train_prefix_reward_model(
            backbone, texts[1:], labels[1:], tmp_path / "y", spec=spec, device="cpu", checkpoints=checkpoints
        )


def test_shares_of_ranks_add_up_to_the_whole_batch(tmp_path):
    """Mean over ranks of the ranks' gradients = the gradient of one process, short last batch included."""
    backbone = save_backbone(tmp_path)
    texts, labels = task(10)
    spec = PrefixRewardTrainSpec(batch_size=7)

    def gradients(rank: int, world: int, step: int) -> torch.Tensor:
        model, tokenizer = build_reward_model(backbone, 0)
        trainer = RewardTrainer(model, RewardExamples(tokenizer, texts, labels, 8), spec, rank, world)
        trainer.step = step
        trainer._loss().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    for step in (0, 1):
        shares = [gradients(rank, 4, step) for rank in range(4)]
        torch.testing.assert_close(torch.stack(shares).mean(0), gradients(0, 1, step), atol=1e-7, rtol=1e-4)


def test_case_b17_long_texts_are_cut_and_counted_or_refused_with_both_numbers(tmp_path):
    model, tokenizer = build_reward_model(save_backbone(tmp_path, "gpt2"), seed=0)  # 64 positions
    texts = ["w3 " * 70, "w4 " * 8, "w5 " * 9]
    examples = RewardExamples(tokenizer, texts, [0.0, 1.0, 1.0], 8)
    trainer = RewardTrainer(model, examples, PrefixRewardTrainSpec(max_length=8))
    assert trainer.warning == "2 of 3 texts are cut to max_length = 8 tokens"
    examples = RewardExamples(tokenizer, texts, [0.0, 1.0, 1.0], 100)
    with pytest.raises(ValueError, match="a text has 70 tokens, but the backbone reads 64: set max_length to 64"):
        RewardTrainer(model, examples, PrefixRewardTrainSpec(max_length=100))


def test_loss_that_is_not_finite_changes_nothing(tmp_path):
    model, tokenizer = build_reward_model(save_backbone(tmp_path), seed=0)
    trainer = RewardTrainer(model, RewardExamples(tokenizer, ["w3 w4"], [0.5], 8), PrefixRewardTrainSpec())
    with torch.no_grad():
        model.score.weight[0, 0] = float("nan")
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(ValueError, match="loss of step 1 is nan"):
        trainer.train_step()
    assert torch.equal(before, model.model.embed_tokens.weight)


def test_spearman_with_ties_and_constants():
    first = torch.tensor([1.0, 2.0, 2.0, 4.0, 5.0])
    second = torch.tensor([5.0, 6.0, 7.0, 8.0, 7.0])
    ranks = np.corrcoef([1, 2.5, 2.5, 4, 5], [1, 2, 3.5, 5, 3.5])[0, 1]
    assert spearman(first, second) == pytest.approx(ranks)
    assert math.isnan(spearman(first, torch.ones(5)))


def test_report_reads_right_positions(tmp_path):
    model = make_classifier(configs()["llama"])
    examples = RewardExamples(make_tokenizer(), ["w3 w4 w5", "w6"], [1.0, 0.0], 8)
    errors = prefix_errors(model, examples, lengths=(1, 2, 4))
    assert [(e.length, e.examples) for e in errors] == [(1, 2), (2, 1), (None, 2)]
    with torch.no_grad():
        at_two = model.score(model.model(torch.tensor([[3, 4]]))[0][0, -1]).sigmoid()
    assert errors[1].mse == pytest.approx(float((at_two - 1) ** 2), abs=1e-6)
    assert markdown_table(errors).count("\n") == 5 and "whole text | 2" in markdown_table(errors)
    plot_errors(errors, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


class TestCommand:
    def files(self, tmp_path, **training) -> Path:
        texts, labels = task(40)
        rows = [json.dumps({"text": t, "stars": 4 * y + 1}) for t, y in zip(texts, labels, strict=True)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        config = {
            "backbone": save_backbone(tmp_path / "backbone"),
            "output_dir": str(tmp_path / "out"),
            "data": {
                "train_path": str(tmp_path / "rows.jsonl"),
                "label_column": "stars",
                "label_min": 1,
                "label_max": 5,
                "held_out_fraction": 0.25,
            },
            "training": {"batch_size": 8, "learning_rate": 1e-3, **training},
        }
        (tmp_path / "reward.yaml").write_text(json.dumps(config))
        return tmp_path / "reward.yaml"

    def test_trains_and_reports(self, tmp_path, capsys):
        from openrlhf_ebft.cli.train_reward import main

        assert main([str(self.files(tmp_path)), "--training.epochs", "2"]) == 0
        out, err = capsys.readouterr()
        assert "training on 30 texts, 10 held out" in err and "8/8 loss" in err
        assert "| whole text | 10 |" in out
        for name in ("model.safetensors", "held_out.md", "held_out.png", "held_out.json", "reward_config.yaml"):
            assert (tmp_path / "out" / name).exists(), name
        load_sequence_classifier(tmp_path / "out")

    @pytest.mark.stack
    def test_two_ranks_equal_one(self, tmp_path, capsys, caplog):
        """Two Ray actors with DeepSpeed end at the weights of one process, and warn of the same cut texts."""
        from openrlhf_ebft.cli.train_reward import main

        config = str(self.files(tmp_path, max_length=7))
        assert main([config]) == 0
        two = str(tmp_path / "two")
        assert main([config, "--training.ranks", "2", "--output_dir", two]) == 0
        warnings = [text for text in caplog.messages if "texts are cut to max_length = 7 tokens" in text]
        assert len(warnings) == 2 and warnings[0] == warnings[1]
        assert "4/4 loss" in capsys.readouterr().err
        one, _ = load_sequence_classifier(tmp_path / "out")
        both, _ = load_sequence_classifier(two)
        start, _ = build_reward_model(str(tmp_path / "backbone"), 0)
        moved = 0.0
        for first, second, before in zip(one.parameters(), both.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(first, second, atol=2e-5, rtol=1e-4)
            moved = max(moved, float((first - before).detach().abs().max()))
        assert moved > 1e-3

    @pytest.mark.stack
    def test_two_ranks_resume_as_if_they_had_not_stopped(self, tmp_path, capsys):
        """Dropout on, optimizer states in shards; the checkpoint after step 2 of 4 is what a killed run leaves."""
        from openrlhf_ebft.cli.train_reward import main
        from openrlhf_ebft.config.errors import UserError

        config = str(self.files(tmp_path))
        settings = json.loads((tmp_path / "backbone" / "config.json").read_text())
        (tmp_path / "backbone" / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.3}))
        out, flags = tmp_path / "out", ["--training.ranks", "2", "--training.checkpoint_every"]
        assert main([config, *flags, "2"]) == 0
        straight, _ = load_sequence_classifier(out)
        (out / "model.safetensors").unlink()
        capsys.readouterr()
        assert main([config, *flags, "2"]) == 0
        lines = capsys.readouterr().err
        assert "4/4 loss" in lines and "2/4 loss" not in lines
        again, _ = load_sequence_classifier(out)
        for first, second in zip(straight.parameters(), again.parameters(), strict=True):
            assert torch.equal(first, second)
        assert main([config, "--training.ranks", "2", "--training.zero_stage", "1"]) == 1
        assert "zero_stage = 2, not 2 and 1" in capsys.readouterr().err
        with pytest.raises(UserError, match=r"step-2 was written by 2 ranks"):
            main([config])

    def test_faults_are_named(self, tmp_path):
        from openrlhf_ebft.cli.train_reward import main
        from openrlhf_ebft.config.errors import UserError

        config = str(self.files(tmp_path))
        (tmp_path / "huge.jsonl").write_text('{"text": "w3", "stars": %s}' % ("9" * 5000), encoding="utf-8")
        for flags, message in (
            (["--training.epoch", "2"], "did you mean --training.epochs"),
            (["--training.ranks", "9"], "training.batch_size = 8 must be at least training.ranks = 9"),
            (["--data.label_max", "0"], "data.label_max = 0"),
            (["--data.label_max", "3"], r"line \d+: 'stars' must be a number from 1.0 to 3.0, got 5.0"),
            (["--data.text_column", "review"], "line 1: has no column 'review'; it has stars, text"),
            (["--backbone", str(tmp_path / "none")], "none is neither a folder with a model nor a model that the hub"),
            (["--data.train_path", str(tmp_path / "huge.jsonl")], "huge.jsonl, line 1: not JSON: .* 5000 digits"),
        ):
            with pytest.raises(UserError, match=message):
                main([config, *flags])
