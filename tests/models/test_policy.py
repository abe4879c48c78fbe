"""Tree attention gives the numbers of ordinary causal sequences: every family, layout and padding side."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.models.policy import LogitsHead, PolicyModel
from tests.trees import make_reference, make_tree

VOCAB = 64
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "mistral-window": {**GROUPED, "sliding_window": 4},
    "gemma2": {**GROUPED, "sliding_window": 4, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SMALL,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "cohere": {**SMALL, "num_key_value_heads": 2, "logit_scale": 0.25},
    "granite": {**SMALL, "num_key_value_heads": 2, "logits_scaling": 3.0},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def build(family: str, attention: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.split("-")[0], vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **FAMILIES[family]
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large weights, so that a wrong mask shows
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def trees():
    """Two tokens to choose from in the last one, so that samples agree at first."""
    return [
        make_tree(make_reference(9, [4], seed=1), [[3, 6, 1]], seed=2),
        make_tree(make_reference(14, [3, 7, 10], window=3, seed=3), [[4, 2], [1, 5], [3, 3]], seed=4),
        make_tree(make_reference(11, [2, 6], window=3, seed=5), [[4, 2, 4, 3], [1, 5, 5, 4]], vocab=5, seed=6),
    ]


def logprobs_alone(model, tree, temperature):
    """Every branch as its own plain causal sequence through the whole model; the reference likewise."""
    branches = []
    for branch in range(tree.num_branches):
        ids = tree.token_ids[tree.branch_indices(branch)]
        anchor = int(tree.reference.anchors[branch // tree.num_samples])
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        branches.append(torch.log_softmax(logits, -1)[range(anchor - 1, len(ids) - 1), ids[anchor:]])
    reference = tree.reference.token_ids
    logits = torch.log_softmax(model(input_ids=reference[None], use_cache=False).logits[0].float(), -1)
    supervised = tree.supervised_tokens
    return torch.cat(branches), logits[supervised - 1, reference[supervised]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mode", "attention"), [("sdpa", "sdpa"), ("eager", "eager"), ("rows", "sdpa"), ("split", "sdpa")]
)
def test_tree_equals_every_branch_alone(family, mode, attention):
    if family == "gemma2":
        attention = "eager"  # its score capping exists in eager attention only
    model = build(family, attention)
    with torch.no_grad():
        expected = [logprobs_alone(model, tree, 0.6) for tree in trees()]
        policy = PolicyModel(model, mode, temperature=0.6, chunk_tokens=5)
        for side in ("left", "right"):
            result = policy(TreeBatch.collate(trees(), padding_side=side))
            torch.testing.assert_close(result.branch, torch.cat([e[0] for e in expected]), atol=1e-4, rtol=0)
            torch.testing.assert_close(result.supervised, torch.cat([e[1] for e in expected]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window"])
@pytest.mark.parametrize("mode", ["sdpa", "split"])
def test_documents_are_masked_alike_in_tree_and_rows(family, mode):
    documents = [0] * 6 + [1] * 5 + [2] * 5
    tree = make_tree(make_reference(16, [3, 5, 8, 11], window=3, documents=documents), [[3, 3]] * 4)
    model = build(family, "sdpa")
    with torch.no_grad():
        rows = PolicyModel(model, "rows", temperature=1.0, chunk_tokens=64)(TreeBatch.collate([tree]))
        whole = PolicyModel(model, mode, temperature=1.0, chunk_tokens=64)(TreeBatch.collate([tree]))
    torch.testing.assert_close(whole.branch, rows.branch, atol=1e-4, rtol=0)
    torch.testing.assert_close(whole.supervised, rows.supervised, atol=1e-4, rtol=0)


def layers(model):
    return model.base_model.layers


@pytest.mark.parametrize("mode", ["sdpa", "split"])
def test_tokens_that_a_branch_must_not_see_do_not_change_it(mode):
    model = build("llama", "sdpa")
    policy = PolicyModel(model, mode, temperature=1.0, chunk_tokens=64)
    tree = make_tree(make_reference(10, [4, 6], window=3), [[3, 2], [2, 3]])
    changed = tree.branch_tokens.clone()
    hidden_from_first = torch.nonzero(tree.branch_of_token != 0).flatten()
    changed[hidden_from_first] = (changed[hidden_from_first] + 7) % VOCAB
    reference = tree.reference.token_ids.clone()
    reference[4:] = (reference[4:] + 5) % VOCAB
    other = type(tree)(
        type(tree.reference)(**{**vars(tree.reference), "token_ids": reference}),
        changed,
        tree.branch_lengths,
        tree.sampler_logprobs,
    )
    own = slice(10, 12)  # what predicts in the first branch: states of every layer, and its log-probabilities
    states: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out[:, own])) for layer in layers(model)]
    with torch.no_grad():
        first, second = (policy(TreeBatch.collate([t])).branch[:3] for t in (tree, other))
    for hook in hooks:
        hook.remove()
    assert torch.equal(first, second)
    half = len(states) // 2
    assert half == model.config.num_hidden_layers
    for one, two in zip(states[:half], states[half:], strict=True):
        assert torch.equal(one, two)


def test_samples_that_agree_so_far_are_computed_once():
    """By hand: of (3 4 3), (3 4 4), (4 4 4), (3 4 3) behind one anchor the blocks need 3 3-4, 4 4-4."""
    model = build("llama", "sdpa")
    tree = make_tree(make_reference(6, [4], window=2), [[3, 3, 3, 3]])
    tree = replace(tree, branch_tokens=torch.tensor([3, 4, 3, 3, 4, 4, 4, 4, 4, 3, 4, 3]))
    assert tree.first_alike[6:].tolist() == [6, 7, 8, 6, 7, 11, 12, 13, 14, 6, 7, 8]
    with torch.no_grad():
        branches, supervised = logprobs_alone(model, tree, 0.6)
    policy = PolicyModel(model, "split", temperature=0.6, chunk_tokens=64)
    read, predicted = [], []
    model.base_model.register_forward_hook(lambda _, __, out: read.append(out.last_hidden_state.shape[1]))
    model.lm_head.register_forward_hook(lambda _, inputs, __: predicted.append(len(inputs[0])))
    with torch.no_grad():
        result = policy(TreeBatch.collate([tree]))
    assert read == [6 + 2 + 2]
    assert predicted == [2 + 1 + 2 + 2]  # for the answer at temperature 1, at the anchor, in the branches
    torch.testing.assert_close(result.branch, branches, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.supervised, supervised, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_tree_and_rows_agree(family, checkpointing):
    gradients = []
    for mode in ("rows", "sdpa", "split"):
        model = build(family, "eager" if family == "gemma2" else "sdpa")
        if checkpointing:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        policy = PolicyModel(model, mode, temperature=0.6, chunk_tokens=4)
        result = policy(TreeBatch.collate(trees()))
        (result.branch.sum() + result.supervised.sum() + result.branch_entropy.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(gradient, other[name], atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
        ("hyperclovax", {"logits_scaling": 0.3}),
        ("recurrent_gemma", {"logits_soft_cap": 3.0, "lru_width": 32, "attention_window_size": 8}),
    ],
)
def test_logits_are_scaled_as_the_family_does(kind, settings):
    model = random_model(kind, settings)
    ids = torch.randint(3, VOCAB, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(LogitsHead(model)(model.base_model(input_ids=ids)[0]), model(ids).logits)


@pytest.mark.skipif("gemma4" not in CONFIG_MAPPING_NAMES, reason="this version of transformers has no gemma4")
def test_a_cap_in_the_text_part_of_the_config_counts():
    text = {"vocab_size": VOCAB, **SMALL, "num_key_value_heads": 2, "final_logit_softcapping": 3.0, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=None, audio_config=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, VOCAB, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(LogitsHead(model)(model.base_model(input_ids=ids)[0]), model(ids).logits)


@pytest.mark.parametrize(
    ("kind", "settings"), [("xlstm", {"output_logit_soft_cap": 2.0}), ("inkling_text", {"num_hidden_layers": 1})]
)
def test_logits_that_are_made_in_another_way_are_refused_by_name(kind, settings):
    """B04: the log-probabilities of another distribution than the engine's would train silently."""
    model = random_model(kind, settings)
    forward = model.base_model.forward
    with pytest.raises(ValueError, match=f"{type(model).__name__} makes its logits in a way that is not known here"):
        LogitsHead(model)
    assert model.base_model.forward == forward


def test_weights_between_blocks_and_logits_are_refused():
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM has weights between .* lm_head\.dense\.weight"):
        LogitsHead(random_model("modernbert-decoder", {"cls_token_id": 1, "sep_token_id": 2}))


@pytest.mark.parametrize("kind", ["minimax", "qwen3_next"])
def test_hybrid_models_read_rows(kind):
    """Layers of linear attention take no masks; what lies behind a row changes nothing in it."""
    layers = ["linear_attention", "full_attention"]
    experts = {"num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 1}
    model = random_model(kind, {"layer_types": layers, "head_dim": 8, **experts})
    with torch.no_grad():
        expected = [logprobs_alone(model, tree, 0.6) for tree in trees()]
        result = PolicyModel(model, "rows", temperature=0.6, chunk_tokens=5)(TreeBatch.collate(trees()))
    torch.testing.assert_close(result.branch, torch.cat([e[0] for e in expected]), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.supervised, torch.cat([e[1] for e in expected]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["sdpa", "eager", "split"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("recurrent_gemma", {"lru_width": 32, "attention_window_size": 8}), ("mpt", {}), ("marian", {"d_model": 32})],
)
def test_models_that_a_tree_would_mislead_are_refused_by_name(kind, settings, mode):
    """They read a tree without an error, and tokens of other branches with it."""
    with pytest.raises(ValueError, match=r"model type .* set model\.attention to .*rows"):
        PolicyModel(random_model(kind, settings), mode, temperature=1.0, chunk_tokens=5)


def random_model(kind, settings):
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **{**SMALL, "num_key_value_heads": 2, **ids, **settings})
    return AutoModelForCausalLM.from_config(config).eval()
