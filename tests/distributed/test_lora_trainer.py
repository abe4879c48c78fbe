"""LoRA under DeepSpeed against a plain re-derivation with peft and torch; frozen weights never move."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf_ebft.config.sections import FeatureConfig
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.feature_network import load_feature_network
from openrlhf_ebft.models.loading import load_causal_lm
from openrlhf_ebft.models.lora import load_merged
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures
from tests.distributed.trainer_steps import step_items
from tests.processes import run_ranks
from tests.tiny_models import tiny_llama

ONE_RANK = {
    "one": {},
    "rslora": {"lora": {"rslora": True, "targets": ["q_proj", "down_proj"]}},
    "dropout": {"lora": {"dropout": 0.3}},
}
TWO_RANKS = {f"zero{stage}": {"zero_stage": stage, "num_ranks": 2} for stage in range(4)} | {
    "zero3_checkpointed": {"zero_stage": 3, "num_ranks": 2, "gradient_checkpointing": True},
    "zero3_bf16": {"zero_stage": 3, "num_ranks": 2, "dtype": "bfloat16"},
}
EXACT = ["one", *(name for name in TWO_RANKS if "bf16" not in name)]
ALL = [*ONE_RANK, *TWO_RANKS]

pytestmark = pytest.mark.stack


def branch_terms(model, item):
    """(policy loss, entropy) of every completion, each run alone at temperature 0.7."""
    tree = item.tree
    for branch, advantage in enumerate(item.advantages.flatten().tolist()):
        ids = tree.token_ids[tree.branch_indices(branch)]
        start = len(ids) - int(tree.branch_lengths.flatten()[branch])
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0, start - 1 : -1] / 0.7, -1)
        yield -advantage * table[range(len(ids) - start), ids[start:]].mean(), -(table.exp() * table).sum(-1).mean()


def plain_training(folder: Path) -> dict[str, torch.Tensor]:
    """Three steps of the adapters alone, with nothing but torch, transformers and peft; the adapters' tensors."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(derive_seed(0, "lora"))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, factor in enumerate((0.5, 1.0, 0.0)):
        ce, policy, entropy = [], [], []
        for item in step_items(step):
            reference, supervised = item.tree.reference.token_ids, item.tree.supervised_tokens
            logprobs = torch.log_softmax(model(input_ids=reference[None]).logits[0], -1)
            ce.append(-logprobs[supervised - 1, reference[supervised]].mean())
            for loss, bits in branch_terms(model, item):
                policy.append(loss)
                entropy.append(bits)
        loss = torch.stack(ce).mean()
        if step > 0:
            loss = 0.1 * loss + torch.stack(policy).mean() - 0.01 * torch.stack(entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
    return {name.replace(".default", ""): tensor.detach() for name, tensor in trained.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    tiny_llama(folder / "model")
    run_ranks("tests.distributed.lora_rank", 1, str(folder), json.dumps(ONE_RANK))
    run_ranks("tests.distributed.lora_rank", 2, str(folder), json.dumps(TWO_RANKS))
    return folder


@pytest.mark.parametrize("name", EXACT)
def test_every_layout_trains_the_adapters_of_the_plain_run(trained, name):
    right = plain_training(trained / "model")
    adapters = load_file(trained / f"{name}-adapters.safetensors")
    assert set(adapters) == set(right)
    assert all(float(t.abs().max()) > 1e-3 for key, t in right.items() if ".lora_B." in key)
    for key, value in right.items():
        torch.testing.assert_close(adapters[key], value, atol=1e-5, rtol=0, msg=f"{name}: {key}")


@pytest.mark.parametrize("name", ALL)
def test_base_weights_stay_bit_for_bit_through_training_and_ten_exports(trained, name):
    record = json.loads((trained / f"{name}.json").read_text())
    assert all(record["intact"])
    assert record["trainable"] == (2 * 2 * 2 if name == "rslora" else 2 * 2 * 7)  # layers x factors x modules


@pytest.mark.parametrize("name", ALL)
def test_resuming_is_exact(trained, name):
    assert json.loads((trained / f"{name}.json").read_text())["resumed"]


@pytest.mark.parametrize("name", ALL)
def test_without_adapters_the_trainer_is_the_base_model(trained, name):
    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    reference, supervised = (tree := step_items(0)[0].tree).reference.token_ids, tree.supervised_tokens
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=reference[None]).logits[0], -1)
    nats = -logprobs[supervised - 1, reference[supervised]].sum().item()
    record = json.loads((trained / f"{name}.json").read_text())
    assert record["base_score"] == pytest.approx(nats, rel=2e-2 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", [name for name in ALL if "bf16" not in name])
def test_base_model_features_and_reference_equal_those_of_separate_models(trained, name):
    """Between two steps, so with adapters that have moved; the later steps are those of the plain run all the same."""
    values = load_file(trained / f"{name}-base.safetensors")
    network = load_feature_network(str(trained / "model"))
    assert values["depths"].tolist() == network.layer_indices
    features = TreeFeatures(network, FeatureConfig(embed_method="completion_mean"), special_ids=(1,), mode="sdpa")
    reference = PolicyModel(
        load_causal_lm(str(trained / "model"), dtype=torch.float32), "sdpa", temperature=0.7, chunk_tokens=100
    )
    for number, item in enumerate(step_items(0)):
        torch.testing.assert_close(values[f"gram{number}"], features.group_grams([item.tree])[0], atol=1e-6, rtol=1e-6)
        with torch.no_grad():
            right = reference(TreeBatch.collate([item.tree])).branch
        torch.testing.assert_close(values[f"logprobs{number}"], right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_saved_adapters_are_the_whole_model_and_peft_reads_them(trained, name):
    saved = trained / f"{name}-model"
    assert sorted(path.name for path in saved.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, saved).eval()
    merged = load_merged(saved, dtype=torch.float32).eval()
    exported = load_file(trained / f"{name}.safetensors")
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Logits go up to 3, and merged weights are rounded once more than base and adapters.
        torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=2e-5, rtol=1e-5)
    tolerance = 2e-2 if "bf16" in name else 1e-6
    for key, tensor in merged.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(exported[key], tensor.detach(), atol=tolerance, rtol=tolerance, msg=key)


@pytest.mark.parametrize("name", ALL)
def test_checkpoints_hold_no_frozen_weights(trained, name):
    files = [path for path in (trained / f"{name}-checkpoint").rglob("*.pt") if "model_states" in path.name]
    base_bytes = (trained / "model" / "model.safetensors").stat().st_size
    assert files
    for file in files:
        module = torch.load(file, weights_only=False)["module"]
        assert [key for key in module if ".lora_A." not in key and ".lora_B." not in key] == []
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.values()}
        assert sum(storages.values()) < base_bytes / 2
