"""Cached scores equal a fresh full forward of prefix + candidate, whatever the caller does (cases B18, B49, B62)."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import ConvBertConfig, GPT2Config, ModernBertDecoderConfig, XLNetConfig

from openrlhf_ebft.core.positions import position_limit
from openrlhf_ebft.rad import CachedRewardModelValue, RewardModelValue, StepContext
from openrlhf_ebft.rad.cached_value import score_difference
from openrlhf_ebft.rad.loading import sequence_classifier_class
from tests.rad.conftest import SMALL, SPREAD, VOCAB, configs, make_classifier, make_tokenizer, windowed_configs

TOLERANCE = 1e-5


def reward_of(name: str, tmp_path):
    if name != "granite":
        return make_classifier(configs()[name])
    config = configs()["granite"]
    config.num_labels = 1
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    return sequence_classifier_class(tmp_path)(config).eval()


def by_hand(model, prefix: list[int], candidate: int) -> float:
    """Score of one sequence alone: backbone on the real tokens, head on the last one."""
    with torch.no_grad():
        hidden = getattr(model, model.base_model_prefix)(input_ids=torch.tensor([prefix + [candidate]]))
        return float(model.score(hidden.last_hidden_state[0, -1])[0])


def assert_scores(value, model, rows: list[list[int]], candidates: torch.Tensor, side: str = "left", width: int = 0):
    """Score padded rows and compare every candidate with the sequence alone."""
    width = max(width, *(len(row) for row in rows))
    ids = torch.full((len(rows), width), 1)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, place] = torch.tensor(row, dtype=torch.long)
        mask[index, place] = 1
    got = value.score(StepContext(ids, candidates, attention_mask=mask))
    want = torch.tensor(
        [
            [by_hand(model, row, int(candidate)) for candidate in line]
            for row, line in zip(rows, candidates, strict=True)
        ]
    )
    assert score_difference(got, want) <= TOLERANCE, (got - want).abs().max()
    return got


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", sorted(configs()))
def test_every_step_equals_full_forward(name, side, tmp_path):
    """B18: prompts of 3 and 5 tokens, 4 candidates, 6 steps; the chosen token is one of the candidates."""
    model = reward_of(name, tmp_path)
    value = CachedRewardModelValue(model)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 5)]
    spread = []
    for step in range(6):
        candidates = torch.stack([torch.randperm(VOCAB - 3, generator=generator)[:4] + 3 for _ in rows])
        before = value.tokens_forwarded
        spread.append(assert_scores(value, model, rows, candidates, side).std())
        if step:
            assert value.tokens_forwarded - before == 2 * 4, "an ordinary step costs its candidates only"
        rows = [row + [int(line[step % 4])] for row, line in zip(rows, candidates, strict=True)]
    assert min(spread) > 1e-3, "scores must differ for the comparison to mean anything"


@pytest.mark.parametrize("name", sorted(windowed_configs()))
def test_sliding_windows(name):
    """Prefixes longer than the window."""
    model = make_classifier(windowed_configs()[name])
    value = CachedRewardModelValue(model)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (2, 9)]
    for _ in range(8):
        candidates = torch.randint(3, VOCAB, (2, 5), generator=generator)
        assert_scores(value, model, rows, candidates)
        rows = [row + [int(line[2])] for row, line in zip(rows, candidates, strict=True)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_reordered_dropped_repeated_and_rewound_rows(name):
    """What beam search, contrastive and assisted decoding do to a processor's prefixes."""
    model = make_classifier(configs()[name])
    value = CachedRewardModelValue(model)
    candidates = torch.tensor([[5, 6, 7, 2]])
    a, b, c = [3, 4, 5], [9, 8, 7, 6, 5], [11, 12]
    histories = [
        [a, b, c],
        [c + [6], a + [5], a + [7]],  # reordered, one repeated, one dropped
        [a + [5, 2], c + [6, 6]],  # fewer rows
        [c + [6, 6, 40], a + [5, 2, 30], a + [5], b],  # more rows; tokens that were no candidates; a rewind
        [a[:2], b[:1], [], b],  # rewound into the prompt, and to nothing at all
        [[], []],
        [b + [5, 6, 7], b + [5, 6, 7]],  # several tokens at once
        [[20, 21, 22, 23, 24, 25, 26]],  # another prompt
        [[20, 21, 22, 23, 24, 25, 26]],  # the same step again
    ]
    for rows in histories:
        assert_scores(value, model, rows, candidates.expand(len(rows), -1), width=9)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_random_walk(name):
    """Two hundred random edits of random batches."""
    model = make_classifier(configs()[name])
    value = CachedRewardModelValue(model)
    generator = torch.Generator().manual_seed(5)

    def draw(high: int, low: int = 0) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = [[3, 4, 5]]
    candidates = torch.tensor([[5, 6]])
    for _ in range(200):
        rows = [list(rows[draw(len(rows))]) for _ in range(draw(4, 1))]
        for row in rows:
            del row[len(row) - draw(3) * (draw(4) == 0) :]
            row += [draw(VOCAB) if draw(3) == 0 else int(candidates[0, draw(2)]) for _ in range(draw(3))]
            del row[:-12]
        candidates = torch.randint(0, VOCAB, (1, 2), generator=generator)
        assert_scores(value, model, rows, candidates.expand(len(rows), -1), width=12)


def test_finished_rows_and_eos_candidates():
    """A row goes on with pad (not EOS) while the other is steered; EOS and pad are candidates like any other."""
    model = make_classifier(configs()["llama"])
    model.config.pad_token_id = 1
    value = CachedRewardModelValue(model)
    rows = [[3, 4, 2], [5, 6, 7]]
    for step in range(4):
        candidates = torch.tensor([[2, 1, 9], [2, 1, 8]])
        assert_scores(value, model, rows, candidates)
        rows = [rows[0] + [1], rows[1] + [8 if step % 2 else 2]]


def test_empty_prefix_and_no_mask():
    """B49: no cached token to crop to; a prefix of no tokens is legal."""
    model = make_classifier(configs()["gpt2"])
    for value in (CachedRewardModelValue(model), RewardModelValue(model)):
        got = value.score(StepContext(torch.zeros(2, 0, dtype=torch.long), torch.tensor([[4, 5], [6, 7]])))
        assert got[1, 0].item() == pytest.approx(by_hand(model, [], 6), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prefix_beyond_the_limit_keeps_the_last_tokens(name):
    model = make_classifier(configs()[name])
    cached = CachedRewardModelValue(model, max_length=8)
    stateless = RewardModelValue(model, max_length=8)
    row = list(range(3, 9))
    for token in (9, 10, 11, 12):
        candidates = torch.tensor([[token, 20]])
        context = StepContext(torch.tensor([row]), candidates)
        want = [by_hand(model, row[-7:], token), by_hand(model, row[-7:], 20)]
        for value in (cached, stateless):
            assert score_difference(value.score(context), torch.tensor([want])) <= TOLERANCE
        row = row + [token]
    assert RewardModelValue(model).max_length == 64


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "modernbert_decoder", "xlnet", "convbert"])
def test_ragged_batches_score_alike(name):
    """B62: no pad id, texts of 2, 5 and 9 tokens, EOS inside, batches of 1, 2 and 3.

    The ModernBERT decoder finds the last token by its pad id, in its own forward. XLNet reads the last place of a row,
    and ConvBERT's convolutions mix padding into its neighbours.
    """
    from tests.rad.conftest import encoder_configs

    special = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "cls_token_id": 0, "sep_token_id": 2}
    decoder = ModernBertDecoderConfig(**SMALL, **SPREAD, **special, intermediate_size=48, max_position_embeddings=64)
    xlnet = XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48, **SPREAD)
    convbert = ConvBertConfig(**SMALL, **SPREAD, intermediate_size=48, max_position_embeddings=64)
    others = {"modernbert_decoder": decoder, "xlnet": xlnet, "convbert": convbert}
    model = make_classifier({**configs(), **encoder_configs(), **others}[name])
    if name in configs():
        model.config.pad_token_id = None
    rows = [[3, 4], [5, 2, 6, 7, 2], [8, 9, 10, 2, 11, 12, 13, 14, 15]]
    value = RewardModelValue(model)

    def scores(group: list[list[int]]) -> list[float]:
        padded = torch.full((len(group), 9), 7)
        for index, row in enumerate(group):
            padded[index, : len(row)] = torch.tensor(row)
        return value.score_sequences(padded, torch.tensor([len(row) for row in group])).tolist()

    alone = [scores([row])[0] for row in rows]
    assert scores(rows) == pytest.approx(alone, abs=TOLERANCE)
    assert scores(rows[:2]) == pytest.approx(alone[:2], abs=TOLERANCE)
    assert scores(rows[::-1]) == pytest.approx(alone[::-1], abs=TOLERANCE)
    assert max(alone) - min(alone) > 1e-3
    if name in ("xlnet", "convbert"):
        plain = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
        assert alone == pytest.approx(plain, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "roberta", "opt", "gpt2"])
def test_prompts_beyond_the_position_table(name):
    """RoBERTa numbers positions from the pad id on, OPT shifts them: neither may run out of its table."""
    from tests.rad.conftest import encoder_configs

    model = make_classifier({**configs(), **encoder_configs()}[name])
    value = RewardModelValue(model)
    assert value.max_length == (66 if name == "bert" else 64)
    ids = torch.randint(3, VOCAB, (2, 90), generator=torch.Generator().manual_seed(0))
    got = value.score(StepContext(ids, torch.tensor([[4], [5]])))
    kept = StepContext(ids[:, -(value.max_length - 1) :], torch.tensor([[4], [5]]))
    torch.testing.assert_close(got, value.score(kept))


def test_models_that_state_no_limit_have_none():
    assert position_limit(XLNetConfig()) is None, "its max_position_embeddings is -1"
    assert position_limit(GPT2Config(n_positions=8)) == 8


def test_longrope_is_not_read_beyond_the_length_that_changes_all_positions():
    """Beyond it a score would depend on its neighbours in the batch (B62), and on when its keys were made (B18)."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    config = configs()["llama"]
    config.rope_parameters = {**rope, "original_max_position_embeddings": 16, "factor": 4.0}
    model = make_classifier(config)
    cached, stateless = CachedRewardModelValue(model), RewardModelValue(model)
    assert cached.max_length == stateless.max_length == 16
    row = list(range(3, 16))
    for token in range(20, 25):
        context = StepContext(torch.tensor([row]), torch.tensor([[token, 20]]))
        want = torch.tensor([[by_hand(model, row[-15:], token), by_hand(model, row[-15:], 20)]])
        assert score_difference(cached.score(context), want) <= TOLERANCE
        assert score_difference(stateless.score(context), want) <= TOLERANCE
        row.append(token)


def test_two_threads_on_one_value():
    """Alternating callers on ONE value are slow but right; copies do not meet at all."""
    model = make_classifier(configs()["llama"])
    value = CachedRewardModelValue(model)
    faults: list[BaseException] = []

    def walk(start: int, own: CachedRewardModelValue) -> None:
        try:
            row = [start]
            for step in range(12):
                candidates = torch.tensor([[start + step, 5]])
                assert_scores(own, model, [row], candidates)
                row = row + [start + step]
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=walk, args=(10 + 5 * i, value)) for i in range(2)]
    threads += [threading.Thread(target=walk, args=(20 + 5 * i, value.for_call())) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_verify_finds_a_corrupted_cache():
    model = make_classifier(configs()["llama"])
    value = CachedRewardModelValue(model, verify=True)
    candidates = torch.tensor([[5, 6]])
    value.score(StepContext(torch.tensor([[3, 4]]), candidates))
    with torch.inference_mode():
        value._cache.layers[0].values[:, :, 0] += 1
    with pytest.raises(RuntimeError, match="prefix of 3 tokens"):
        value.score(StepContext(torch.tensor([[3, 4, 5]]), candidates))


def test_unknown_ids_are_named():
    model = make_classifier(configs()["llama"])
    for value in (CachedRewardModelValue(model), RewardModelValue(model)):
        with pytest.raises(ValueError, match=rf"prefix holds token id {VOCAB}.*{VOCAB} rows"):
            value.score(StepContext(torch.tensor([[VOCAB]]), torch.tensor([[3]])))


def test_after_a_failed_forward_the_next_step_is_right():
    model = make_classifier(configs()["llama"])
    value = CachedRewardModelValue(model)
    candidates = torch.tensor([[5, 6]])
    assert_scores(value, model, [[3, 4]], candidates)

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        value.score(StepContext(torch.tensor([[3, 4, 5]]), candidates))
    handle.remove()
    assert_scores(value, model, [[3, 4, 5]], candidates)


def test_text_path_equals_encoding_by_hand():
    """Word pieces differ between the tokenizers; special tokens of the language model are skipped; cut on the left."""
    model = make_classifier(configs()["gpt2"])
    lm_tokenizer, rm_tokenizer = make_tokenizer(), make_tokenizer(prefix="w")
    rm_tokenizer.add_tokens(["w4 w5"])  # merges two words of the language model
    model.resize_token_embeddings(len(rm_tokenizer))
    value = RewardModelValue(model, rm_tokenizer, shared_vocab=False, max_length=4)
    prefix = torch.tensor([[1, 3, 4], [3, 2, 8], [9, 9, 9]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
    candidates = torch.tensor([[5, 6], [7, 2], [10, 11]])
    got = value.score(StepContext(prefix, candidates, lm_tokenizer=lm_tokenizer, attention_mask=mask))
    texts = ["w3 w4 w5", "w3 w4 w6", "w3 w8 w7", "w3 w8", "w9 w9 w9 w10", "w9 w9 w9 w11"]
    for text, score in zip(texts, got.flatten().tolist(), strict=True):
        ids = rm_tokenizer(text)["input_ids"][-4:]
        assert score == pytest.approx(by_hand(model, ids[:-1], ids[-1]), abs=TOLERANCE)
    assert rm_tokenizer.truncation_side == "right", "the caller's tokenizer is left alone"


def test_text_path_with_an_empty_text():
    model = make_classifier(configs()["gpt2"])
    value = RewardModelValue(model, make_tokenizer(), shared_vocab=False)
    got = value.score(StepContext(torch.zeros(1, 0).long(), torch.tensor([[2]]), lm_tokenizer=make_tokenizer()))
    assert got.item() == pytest.approx(by_hand(model, [], 2), abs=TOLERANCE)


def test_transform_that_is_none_of_the_known():
    with pytest.raises(ValueError, match="score_transform must be one of none, sigmoid, softmax, got 'tanh'"):
        RewardModelValue(make_classifier(configs()["gpt2"]), score_transform="tanh")


def test_score_index_outside_the_outputs():
    model = make_classifier(configs()["llama"], labels=2)
    with pytest.raises(ValueError, match="score_index 2 .* 2 output columns"):
        CachedRewardModelValue(model, score_index=2)


@pytest.mark.parametrize("transform", ["none", "sigmoid", "softmax"])
def test_transforms_on_both_paths(transform):
    model = make_classifier(configs()["llama"], labels=3)
    context = StepContext(torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7]]))
    with torch.no_grad():
        logits = torch.stack([model.score(model.model(torch.tensor([[3, 4, 5, c]]))[0][0, -1]) for c in (6, 7)])
    want = {"none": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}[transform][:, 1]
    for kind in (CachedRewardModelValue, RewardModelValue):
        got = kind(model, score_index=1, score_transform=transform).score(context)[0]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
