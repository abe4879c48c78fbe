"""A toy that a whole run must solve: Ray actors, sampler, features, aggregator, DeepSpeed and evaluation."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer import runs, toy_chain

pytestmark = pytest.mark.stack

STEPS, DOCUMENTS_A_STEP = 120, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    toy_chain.write_inputs(path, documents=2200)
    sections = toy_chain.sections(path)
    sections["optimizer"] |= {"learning_rate": 0.03}
    config = runs.write_config(
        path,
        "toy",
        **sections,
        policy={
            "prompts_per_step": DOCUMENTS_A_STEP,
            "micro_batch_size": DOCUMENTS_A_STEP,
            "max_steps": STEPS,
            "sft_warmup_steps": 0,
            "ce_coef": 0.0,
        },
        evaluation={"max_examples": 80, "show_samples": 0},
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    return path


def held_out_tokens():
    """(200, LENGTH) documents that the run has not seen."""
    generator = torch.Generator().manual_seed(99)
    return torch.stack([toy_chain.draw_document(generator) for _ in range(200)])


def policy_and_chain(model_folder):
    """The policy's and the chain's next-token distributions at every anchor, (anchors, VOCAB) float64 each."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokens = held_out_tokens()[:, : toy_chain.LENGTH - 1]
    with torch.no_grad():
        policy = model(tokens).logits.double().softmax(-1)
    return policy[:, 1:].flatten(0, 1), toy_chain.next_token(tokens)[:, 1:].flatten(0, 1)


def test_the_policy_has_learned_the_chain(folder):
    untrained, chain = policy_and_chain(folder / "policy")
    assert float((untrained - chain).abs().sum(-1).mean() / 2) > 0.3, "an untrained policy is far away"
    trained, _ = policy_and_chain(folder / "runs" / "toy" / "model")
    assert float((trained - chain).abs().sum(-1).mean() / 2) < 0.05, "total variation"
    floor = 1 - chain.square().sum(-1).mean()
    assert float((trained - chain).square().sum(-1).mean() + floor) < 1.05 * float(floor), "expected loss"


def test_the_evaluations_saw_it(folder):
    """The unbiased loss that the run measured itself, from samples of its engine, is at the floor."""
    _, chain = policy_and_chain(folder / "policy")
    floor = float(1 - chain.square().sum(-1).mean())
    before, *steps, after = runs.read_metrics(folder, "toy")
    assert (before["phase"], after["phase"], len(steps)) == ("evaluation", "evaluation", STEPS)
    assert before["cfm_unbiased"] > 1.2 * floor
    assert after["cfm_unbiased"] == pytest.approx(floor, rel=0.05)
    assert after["ce"] < before["ce"]
