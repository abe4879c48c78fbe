"""The DeepSpeed trainer against a plain re-derivation with torch, in every cut of the same batch."""

import enum
import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf_ebft.config.sections import OptimizerConfig
from openrlhf_ebft.distributed.checkpoint_weights import require_plain_files, save_checkpoint_model
from openrlhf_ebft.distributed.optimizer import schedule_factor
from tests.distributed.trainer_rank import SAVED
from tests.distributed.trainer_steps import STEPS, make_config, step_items
from tests.processes import run_ranks
from tests.tiny_models import tiny_llama

ONE_RANK = {
    "whole": {"micro_batch_size": 4},
    "micro": {"micro_batch_size": 1},
    "tokens": {"max_tokens": 40},  # of trees of 12 to 24: two or three passes, one of them full
    "tokens_small": {"max_tokens": 1},  # every tree is above it
    "checkpointed": {"micro_batch_size": 2, "gradient_checkpointing": True},
}
TWO_RANKS = {
    "ranks_tokens": {"max_tokens": 60, "num_ranks": 2},
    "ranks_tokens_zero3": {"max_tokens": 45, "num_ranks": 2, "zero_stage": 3},
    "ranks_micro2": {"micro_batch_size": 2, "num_ranks": 2},
}


def matrix(num_ranks, offloads):
    """Every ZeRO stage and precision with gradients accumulated over passes; checkpointing in every second one."""
    return {
        f"{dtype}_zero{stage}{'_offload' if offload else ''}_{num_ranks}": {
            "dtype": dtype,
            "zero_stage": stage,
            "offload_optimizer": offload,
            "gradient_checkpointing": stage % 2 == 1,
            "num_ranks": num_ranks,
        }
        for dtype in ("float32", "bfloat16", "float16")
        for stage in range(4)
        for offload in offloads
        if stage or not offload
    }


ONE_RANK |= matrix(1, [False])
TWO_RANKS |= matrix(2, [False, True])
POISONED = {
    f"poisoned_{dtype}_zero{stage}": {"dtype": dtype, "zero_stage": stage, "num_ranks": 2, "poisoned_step": 1}
    for dtype, stages in (("float32", (0, 2, 3)), ("bfloat16", (1,)), ("float16", (0, 3)))
    for stage in stages
}
EXACT = [name for name in (*ONE_RANK, *TWO_RANKS) if "float16" not in name]
ROUNDED = [name for name in (*ONE_RANK, *TWO_RANKS) if "float16" in name]


def plain_training(folder):
    """Three steps in float32 with nothing but torch and transformers: every sequence alone, formulas written out."""
    config = make_config(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    norms = []
    for step, factor in enumerate((0.5, 1.0, 0.0)):
        completion_terms, ce_terms, entropies = [], [], []
        for item in step_items(step):
            tree = item.tree
            reference = tree.reference.token_ids
            logprobs = torch.log_softmax(model(reference[None]).logits[0], -1)
            supervised = tree.supervised_tokens
            ce_terms.append(-logprobs[supervised - 1, reference[supervised]].mean())
            for branch, advantage in enumerate(item.advantages.flatten().tolist()):
                ids = tree.token_ids[tree.branch_indices(branch)]
                start = len(ids) - int(tree.branch_lengths.flatten()[branch])
                table = torch.log_softmax(model(ids[None]).logits[0, start - 1 : -1] / 0.7, -1)
                chosen = table[range(len(ids) - start), ids[start:]]
                completion_terms.append(-advantage * chosen.mean())
                entropies.append(-(table.exp() * table).sum(-1).mean())
        loss = torch.stack(ce_terms).mean()
        if step > 0:
            loss = 0.1 * loss + torch.stack(completion_terms).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
    return dict(model.named_parameters(remove_duplicate=False)), norms


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    tiny_llama(folder / "model")
    run_ranks("tests.distributed.trainer_rank", 1, str(folder), json.dumps(ONE_RANK))
    run_ranks("tests.distributed.trainer_rank", 2, str(folder), json.dumps(TWO_RANKS | POISONED))
    return folder


@pytest.fixture(scope="module")
def plain(trained):
    return plain_training(trained / "model")


@pytest.mark.stack
@pytest.mark.parametrize("name", EXACT)
def test_every_cut_of_the_batch_gives_the_plain_weights(trained, plain, name):
    weights = load_file(trained / f"{name}.safetensors")
    expected, _ = plain
    assert set(weights) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value.detach(), atol=1e-5, rtol=0, msg=f"{name}: {key}")


@pytest.mark.stack
@pytest.mark.parametrize("name", ROUNDED)
def test_16_bits_stay_near_the_float32_weights(trained, plain, name):
    """Cosine between the changes of each tensor: measured 0.969 and more in bfloat16, 0.996 and more in float16."""
    weights = load_file(trained / f"{name}.safetensors")
    start = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    moved = dict(start.named_parameters(remove_duplicate=False))
    expected, _ = plain
    for key, value in expected.items():
        update, exact = weights[key] - moved[key].detach(), value.detach() - moved[key].detach()
        cosine = torch.nn.functional.cosine_similarity(update.flatten(), exact.flatten(), dim=0)
        limit = 0.95 if name.startswith("bfloat16") else 0.99
        assert cosine > limit, f"{name}: {key} moved another way ({float(cosine):.4f})"


@pytest.mark.stack
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_holds_no_code_and_exports_the_trained_weights(trained, name, tmp_path):
    checkpoint = trained / f"{name}-checkpoint"
    require_plain_files(checkpoint)
    dtype, stage, _ = name.split("_")
    config = make_config(trained / "model", dtype=dtype, zero_stage=int(stage[-1]), num_ranks=2)
    save_checkpoint_model(checkpoint, config, tmp_path)
    weights = load_file(trained / f"{name}.safetensors")
    for key, value in load_file(tmp_path / "model.safetensors").items():
        assert value.dtype == getattr(torch, dtype)
        torch.testing.assert_close(value.float(), weights[key], atol=0, rtol=0, msg=f"{name}: {key}")


@pytest.mark.stack
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_written_in_the_background_is_the_same(trained, name):
    """The step that was made meanwhile is not in it."""
    at_once, later = trained / f"{name}-checkpoint", trained / f"{name}-background"
    files = sorted(path.relative_to(at_once) for path in at_once.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(later) for path in later.rglob("*") if path.is_file())
    tensors = [file for file in files if file.suffix == ".pt"]
    assert len(tensors) >= 1
    for file in tensors:
        assert_same(*(torch.load(folder / file, weights_only=False) for folder in (at_once, later)))


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.equal(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    elif hasattr(one, "__dict__") and not isinstance(one, enum.Enum):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


class Harm:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, whole):
    """As ZeRO 0 to 2 write weights, and as ZeRO-3 does, whose files DeepSpeed's converter reads."""
    model, folder = tmp_path / "model", tmp_path / "deepspeed"
    tiny_llama(model)
    folder.mkdir()
    state = {"module": {"a": torch.zeros(2)}, "scaler": Harm(tmp_path / "harm")}
    torch.save(state, folder / f"{'' if whole else 'zero_pp_rank_0_'}mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"model_states.pt names \S*mkdir: .* tensors and plain values alone"):
        save_checkpoint_model(tmp_path, make_config(model), tmp_path / "out")
    assert not (tmp_path / "harm").exists()


@pytest.mark.stack
@pytest.mark.parametrize("name", EXACT)
def test_metrics_of_all_ranks_add_up(trained, plain, name):
    record = json.loads((trained / f"{name}.json").read_text())
    whole = json.loads((trained / "whole.json").read_text())
    _, norms = plain
    for step in range(STEPS):
        assert {rank[step]["applied"] for rank in record["metrics"]} == {1.0}
        assert record["metrics"][0][step]["grad_norm"] == pytest.approx(norms[step], rel=1e-4)
        for key in ("loss", "ce_loss") + (("rl_loss", "entropy", "sampler_kl") if step else ()):
            total = sum(rank[step][key] for rank in record["metrics"])
            assert total == pytest.approx(whole["metrics"][0][step][key], abs=1e-5)
    assert record["scores"][0] == pytest.approx(whole["scores"][0], rel=1e-4)


@pytest.mark.stack
@pytest.mark.parametrize("name", POISONED)
def test_a_step_that_is_not_finite_changes_no_weight(trained, name):
    for rank in json.loads((trained / f"{name}.json").read_text())["metrics"]:
        assert [step["applied"] for step in rank] == [1.0, 0.0, 1.0]
        # The scheduler did not move on either: step 2 still runs at the peak, so it changes the weights.
        assert [step["changed"] for step in rank] == [1.0, 0.0, 1.0]
        assert [step["learning_rate"] for step in rank] == pytest.approx([0.005, 0.01, 0.01])
        assert math.isfinite(rank[2]["grad_norm"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_schedule_ends_at_its_minimum_on_the_last_step(schedule, expected):
    config = OptimizerConfig(schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    assert [schedule_factor(step, config, 7) for step in range(7)] == pytest.approx(expected, abs=1e-6)
