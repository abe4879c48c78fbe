"""Several updates on one batch in the DeepSpeed trainer, against a plain re-derivation with torch."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.updates_rank import BATCHES, EPS, LEARNING_RATE, batch_items
from tests.processes import run_ranks
from tests.tiny_models import tiny_llama

FULL = {"updates_per_batch": 3, "clip_low": 0.02, "clip_high": 0.03, "kl_coef": 0.2, "tis_cap": 1.5}
SINGLE = {kind: {"policy": {"loss": kind}} for kind in ("reinforce", "ppo", "gspo")}
SEVERAL = {
    "ppo3": {"policy": {**FULL, "loss": "ppo", "kl_estimator": "k3", "dual_clip": 1.1}},
    "gspo3": {"policy": {**FULL, "loss": "gspo", "kl_estimator": "k2"}},
}
TWO_RANKS = {
    f"ranks_{kind}": {"policy": {**SEVERAL[kind]["policy"], "num_ranks": 2}, "num_ranks": 2, "zero_stage": stage}
    for kind, stage in (("ppo3", 2), ("gspo3", 3))
}


def branch_tables(model, item):
    """(log-probabilities of the chosen tokens, entropies) of every completion, each run alone."""
    tree = item.tree
    for branch in range(tree.num_branches):
        ids = tree.token_ids[tree.branch_indices(branch)]
        start = len(ids) - int(tree.branch_lengths.flatten()[branch])
        table = torch.log_softmax(model(ids[None]).logits[0, start - 1 : -1] / 0.7, -1)
        yield table[range(len(ids) - start), ids[start:]], -(table.exp() * table).sum(-1)


def completion_loss(policy, chosen, old, sampler, reference, advantage):
    """The loss of one completion, formula by formula."""
    size = len(chosen)
    log_ratio = chosen - old
    ratio = (log_ratio.mean().expand(size) if policy["loss"] == "gspo" else log_ratio).exp()
    free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - policy["clip_low"], 1 + policy["clip_high"])
    values = torch.maximum(free, clipped)
    if "dual_clip" in policy and advantage < 0:
        values = torch.minimum(values, torch.tensor(-advantage * policy["dual_clip"]))
    values = values * (old - sampler).exp().clamp(max=policy["tis_cap"])
    difference = chosen - reference
    kl = difference.square() / 2 if policy["kl_estimator"] == "k2" else (-difference).exp() - 1 + difference
    return values.mean() + policy["kl_coef"] * kl.clamp(-10, 10).mean()


def plain_training(folder, policy):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS)
    for batch in range(BATCHES):
        items = batch_items(batch, folder)
        with torch.no_grad():
            old = [[chosen for chosen, _ in branch_tables(model, item)] for item in items]
        for update in range(3):
            terms, ce_terms, entropies = [], [], []
            for item, before in zip(items, old, strict=True):
                tree = item.tree
                ids, supervised = tree.reference.token_ids, tree.supervised_tokens
                logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
                ce_terms.append(-logprobs[supervised - 1, ids[supervised]].mean())
                sizes = tree.branch_lengths.flatten().tolist()
                rows = zip(
                    branch_tables(model, item),
                    before,
                    tree.sampler_logprobs.split(sizes),
                    item.reference_logprobs.split(sizes),
                    item.advantages.flatten().tolist(),
                    strict=True,
                )
                for (chosen, entropy), *known in rows:
                    terms.append(completion_loss(policy, chosen, *known))
                    entropies.append(entropy.mean())
            loss = 0.1 * torch.stack(ce_terms).mean() + torch.stack(terms).mean() - 0.01 * torch.stack(entropies).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (0.5 if batch == update == 0 else 1.0)  # one step of warm-up
            optimizer.step()
    return dict(model.named_parameters(remove_duplicate=False))


ADAPTED = {"adapted": {"policy": {"loss": "reinforce"}, "lora_rank": 4}}
ADAPTED_RANKS = {
    "ranks_adapted": {"policy": {"loss": "reinforce", "num_ranks": 2}, "lora_rank": 4, "num_ranks": 2, "zero_stage": 3}
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    tiny_llama(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        patch.setenv("PATH", "/usr/bin:/bin")  # no ninja
        _run(folder)
    return folder


def _run(folder):
    run_ranks("tests.distributed.updates_rank", 1, str(folder), json.dumps(SINGLE | SEVERAL | ADAPTED))
    run_ranks("tests.distributed.updates_rank", 2, str(folder), json.dumps(TWO_RANKS | ADAPTED_RANKS))


@pytest.mark.stack
def test_the_trainer_compiles_nothing(folder):
    """A rank killed while it compiles would leave a lock on which the next one waits for ever."""
    assert not (folder / "extensions").exists()


@pytest.fixture(scope="module")
def plain(folder):
    return {kind: plain_training(folder / "model", SEVERAL[kind]["policy"]) for kind in SEVERAL}


@pytest.mark.stack
@pytest.mark.parametrize("name", [*SEVERAL, *TWO_RANKS])
def test_weights_equal_those_of_the_plain_derivation(folder, plain, name):
    weights = load_file(folder / f"{name}.safetensors")
    for key, value in plain[name.removeprefix("ranks_")].items():
        torch.testing.assert_close(weights[key], value.detach(), atol=1e-5, rtol=0, msg=f"{name}: {key}")


@pytest.mark.stack
@pytest.mark.parametrize("name", SEVERAL)
def test_ratios_begin_at_one_and_clipping_sets_in(folder, name):
    (metrics,) = json.loads((folder / f"{name}.json").read_text())
    for batch in range(BATCHES):
        first, *later = metrics[3 * batch : 3 * batch + 3]
        assert first["policy/update_kl"] == first["policy/clipped_share"] == 0.0
        assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        for update in later:
            assert update["policy/update_kl"] > 0 and 0 < update["policy/clipped_share"] < 1.001
            # Sampler and policy at rollout time stay what they were.
            for key in ("tis/ratio", "tis/capped_share", "sampler_kl"):
                assert update[key] == pytest.approx(first[key])
        assert math.isfinite(first["kl"]) and 0 < first["tis/capped_share"] < 1


@pytest.mark.stack
@pytest.mark.parametrize(("kind", "tolerance"), [("ppo", 0.0), ("gspo", 1e-6)])
def test_one_update_is_reinforce(folder, kind, tolerance):
    expected, weights = (load_file(folder / f"{name}.safetensors") for name in ("reinforce", kind))
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=tolerance, rtol=0, msg=key)


@pytest.mark.stack
@pytest.mark.parametrize("name", [*ADAPTED, *ADAPTED_RANKS])
def test_the_base_model_without_adapters_is_the_reference_model(folder, name):
    """reference.source: policy_base gives what a separate reference model gives, while the policy has moved on."""
    for metrics in json.loads((folder / f"{name}.json").read_text()):
        assert metrics[-1]["base_difference"] < 1e-5
        assert metrics[-1]["policy_difference"] > 1e-3
