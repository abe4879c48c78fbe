"""extract_hidden_states against transformers' own output_hidden_states, and what it must not run, keep or change."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from openrlhf_ebft.core.pooling import apply_embed_method
from openrlhf_ebft.models.hidden_states import HiddenStateTap, extract_hidden_states, find_blocks
from tests.live_bytes import LiveBytes
from tests.models.families import BERT, CONFIGS, HIDDEN, LAYERS, build, padded_batch

ALL = list(range(LAYERS + 1))


def transformers_states(model, ids, mask, indices):
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    return torch.cat([states[index] for index in indices], dim=-1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_transformers_at_every_depth(family, auto_class, side):
    model = build(auto_class, CONFIGS[family])
    ids, mask = padded_batch(side)
    same_width = ALL[:-1] if family == "opt_projected" else ALL
    right = transformers_states(model, ids, mask, same_width)
    torch.testing.assert_close(extract_hidden_states(model, ids, mask, same_width), right, atol=1e-5, rtol=1e-5)
    for index in ALL:
        one = extract_hidden_states(model, ids, mask, [index], batch_size=2)
        torch.testing.assert_close(one, transformers_states(model, ids, mask, [index]), atol=1e-5, rtol=1e-5)


def test_encoder_equals_transformers():
    model = build(AutoModel, BERT)
    ids, mask = padded_batch("right")
    right = transformers_states(model, ids, mask, ALL)
    torch.testing.assert_close(extract_hidden_states(model, ids, mask, ALL), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_chunked_equals_whole_and_order_and_repeats_are_kept(batch_size):
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    whole = extract_hidden_states(model, ids, mask, [3, 1, 3])
    torch.testing.assert_close(extract_hidden_states(model, ids, mask, [3, 1, 3], batch_size), whole)
    torch.testing.assert_close(whole, transformers_states(model, ids, mask, [3, 1, 3]))


def test_position_ids_and_no_mask():
    model = build(AutoModelForCausalLM, CONFIGS["gpt2"])
    ids, _ = padded_batch("left", rows=1)
    moved = torch.arange(9).unsqueeze(0) + 5
    with torch.no_grad():
        right = model(input_ids=ids, position_ids=moved, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(extract_hidden_states(model, ids, None, [2], position_ids=moved), right)
    assert not torch.allclose(extract_hidden_states(model, ids, None, [2]), right)


@pytest.mark.parametrize(("indices", "blocks_run"), [([0], 0), ([2, 0], 2), ([3], 3), ([LAYERS], LAYERS)])
def test_runs_no_head_and_no_block_above_the_deepest(indices, blocks_run):
    model = build(AutoModelForCausalLM, CONFIGS["qwen3"])
    ran = []
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    model.model.norm.register_forward_hook(lambda *_: ran.append("norm"))
    for number, block in enumerate(model.model.layers, start=1):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    extract_hidden_states(model, *padded_batch("left"), indices)
    assert ran == [*range(1, blocks_run + 1), *(["norm"] if blocks_run == LAYERS else [])]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_case_b62_ragged_rows_give_the_same_last_token_in_every_batching(family, side):
    model = build(AutoModelForCausalLM, CONFIGS[family])
    rows = [[5, 6], [7, 2, 8, 9, 2], [11, 12, 2, 13, 14, 15, 2, 16, 17]]  # 2 is EOS, also inside a text
    alone = []
    for row in rows:
        states = extract_hidden_states(model, torch.tensor([row]), torch.ones(1, len(row)), [2, 4])
        alone.append(apply_embed_method(states, "last_token"))
        torch.testing.assert_close(alone[-1], states[:, -1])
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for batch_size in (1, 2, 3):
        states = extract_hidden_states(model, ids, mask, [2, 4], batch_size, position_ids=positions)
        pooled = apply_embed_method(states, "last_token", mask)
        torch.testing.assert_close(pooled, torch.cat(alone), atol=1e-5, rtol=1e-5)


def all_hooks(model):
    return [(name, len(part._forward_hooks), len(part._forward_pre_hooks)) for name, part in model.named_modules()]


class _Failure(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_hooks_are_restored(fails):
    model = build(AutoModelForCausalLM, CONFIGS["gpt2"]).train()
    model.transformer.h[1].eval()

    def hook(*_):
        assert not any(part.training for part in model.modules())
        if fails:
            raise _Failure

    model.transformer.h[1].register_forward_hook(hook)
    modes = [part.training for part in model.modules()]
    hooks = all_hooks(model)
    ids, mask = padded_batch("left")
    if fails:
        with pytest.raises(_Failure):
            extract_hidden_states(model, ids, mask, [0, 3])
    else:
        first = extract_hidden_states(model, ids, mask, [0, 3])
        assert torch.equal(first, extract_hidden_states(model, ids, mask, [0, 3]))  # dropout is off
    assert [part.training for part in model.modules()] == modes
    assert all_hooks(model) == hooks


def test_inference_mode_and_no_graph():
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    with torch.inference_mode():
        inside = extract_hidden_states(model, ids, mask, [1, LAYERS], 2)
    outside = extract_hidden_states(model, ids, mask, [1, LAYERS])
    assert not outside.requires_grad
    torch.testing.assert_close(inside, outside)


def test_peft_with_adapters_on_and_off():
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    before = transformers_states(model, ids, mask, ALL)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    after = transformers_states(wrapped, ids, mask, ALL)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(extract_hidden_states(wrapped, ids, mask, ALL), after)
    torch.testing.assert_close(extract_hidden_states(wrapped, ids, mask, ALL, adapters=False), before)
    torch.testing.assert_close(extract_hidden_states(wrapped, ids, mask, ALL), after)


def test_compiled_and_data_parallel_wrappers():
    class Wrapper(torch.nn.Module):  # what DeepSpeed's engine and DDP look like from outside
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    right = transformers_states(model, ids, mask, [2])
    torch.testing.assert_close(extract_hidden_states(Wrapper(model), ids, mask, [2]), right)
    torch.testing.assert_close(extract_hidden_states(torch.compile(model), ids, mask, [2]), right)


def peak_bytes(layers: int, extract) -> int:
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": layers})
    model = build(AutoModelForCausalLM, config)
    ids, mask = padded_batch("left", rows=3, length=60)
    with LiveBytes([*model.parameters(), *model.buffers()]) as meter:
        extract(model, ids, mask, [layers // 2, layers])
    return meter.peak


def test_peak_memory_does_not_grow_with_depth():
    state = 3 * 60 * HIDDEN * 4
    assert peak_bytes(16, extract_hidden_states) - peak_bytes(2, extract_hidden_states) < state
    assert peak_bytes(16, transformers_states) - peak_bytes(2, transformers_states) >= 14 * state  # the meter sees it


def test_tree_mask_with_four_axes_passes_through():
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    branch = torch.tensor([[3, 4, 5, 9, 10]])  # reference of 3 tokens, two branches of one token each
    allowed = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    allowed[4, 3] = False
    positions = torch.tensor([[0, 1, 2, 3, 3]])
    tap = HiddenStateTap(model, [1, 3])
    with torch.no_grad():
        tree = tap(input_ids=branch, attention_mask=allowed.view(1, 1, 5, 5), position_ids=positions)
    for row, kept in ((3, [0, 1, 2, 3]), (4, [0, 1, 2, 4])):
        alone = extract_hidden_states(model, branch[:, kept], torch.ones(1, 4), [1, 3])
        torch.testing.assert_close(tree[:, row], alone[:, -1], atol=1e-5, rtol=1e-5)


def test_bad_input():
    model = build(AutoModelForCausalLM, CONFIGS["llama"])
    ids, mask = padded_batch("left")
    for indices, message in (([5], r"5 is outside 0\.\.4"), ([-1], "-1 is outside"), ([], "empty")):
        with pytest.raises(ValueError, match=message):
            extract_hidden_states(model, ids, mask, indices)
    with pytest.raises(ValueError, match=r"\(3, 9\).*\(3, 8\)"):
        extract_hidden_states(model, ids, mask[:, :8], [1])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        extract_hidden_states(model, ids, mask, [1], 0)
    with pytest.raises(ValueError, match="transformers model.*Linear"):
        extract_hidden_states(torch.nn.Linear(2, 2), ids, mask, [1])
    projected = build(AutoModel, CONFIGS["opt_projected"])
    with pytest.raises(ValueError, match=r"depth 4 has 16 features.* 32"):
        extract_hidden_states(projected, ids, mask, [1, 4])
    with pytest.raises(ValueError, match="7 blocks"):
        find_blocks(model.model, 7)
