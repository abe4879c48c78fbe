"""The four steps of the processor: candidates, scores, normalisation, shift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ebft.rad import BaseCandidateValue, StepContext, ValueGuidedProcessor, WeightedValue, select_candidates
from openrlhf_ebft.rad.processor import normalize_values
from openrlhf_ebft.rad.prompt_mask import PromptMask

GOLDEN = Path(__file__).parents[1] / "golden"
PREFIX = torch.tensor([[3, 4]])


class TableValue(BaseCandidateValue):
    """Scores token v of row b with table[b, v]; remembers the contexts it saw."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.seen: list[StepContext] = []

    def score(self, ctx: StepContext) -> torch.Tensor:
        self.seen.append(ctx)
        return self.table.gather(1, ctx.candidate_ids)


@pytest.mark.parametrize("name", ["plain", "invert"])
def test_golden_shift(name):
    golden = np.load(GOLDEN / f"rad_shift_{name}.npz")
    scores, ids = torch.tensor(golden["scores"]), torch.tensor(golden["candidate_ids"])
    table = torch.full_like(scores, float("nan")).scatter(1, ids, torch.tensor(golden["rewards"]))
    processor = ValueGuidedProcessor(
        TableValue(table),
        k=int(golden["top_k"]),
        beta=float(golden["beta"]),
        normalize="clamp",
        invert=name == "invert",
    )
    shifted = processor(torch.zeros(3, 1, dtype=torch.long), scores)
    torch.testing.assert_close(shifted, torch.tensor(golden["shifted"]))


def test_beta_zero_is_top_k_and_equal_rewards_change_nothing():
    scores = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    kept = scores.masked_fill(scores < scores.topk(5).values[:, -1:], float("-inf"))
    random = torch.rand(4, 30)
    assert torch.equal(ValueGuidedProcessor(TableValue(random), k=5, beta=0.0)(PREFIX.repeat(4, 1), scores), kept)
    flat = ValueGuidedProcessor(TableValue(torch.full((4, 30), 0.4)), k=5, beta=30.0, normalize="clamp")
    torch.testing.assert_close(flat(PREFIX.repeat(4, 1), scores).softmax(-1), kept.softmax(-1))


def test_invert_after_the_clamp():
    scores = torch.zeros(1, 4)
    table = torch.tensor([[5.0, 1.0, 0.25, -3.0]])
    got = ValueGuidedProcessor(TableValue(table), k=4, beta=2.0, normalize="clamp", invert=True)(PREFIX, scores)
    assert got[0].tolist() == [0.0, 0.0, 1.5, 2.0]


def test_more_candidates_than_tokens_and_tokens_already_excluded():
    scores = torch.tensor([[1.0, float("-inf"), 2.0, 0.0]])
    table = torch.tensor([[0.5, float("nan"), 1.0, 0.0]])
    got = ValueGuidedProcessor(TableValue(table), k=100, beta=1.0, normalize="minmax")(PREFIX, scores)
    assert got[0].tolist() == [1.5, float("-inf"), 3.0, 0.0]


def test_policies_with_ragged_rows():
    scores = torch.log(torch.tensor([[0.6, 0.3, 0.06, 0.04], [0.3, 0.28, 0.22, 0.2]]))
    ids, valid = select_candidates(scores, "top_p", p=0.7)
    assert [row[keep].tolist() for row, keep in zip(ids, valid, strict=True)] == [[0, 1], [0, 1, 2]]
    scores[0, 2:] = float("-inf")
    ids, valid = select_candidates(scores, "surviving")
    assert [row[keep].tolist() for row, keep in zip(ids, valid, strict=True)] == [[0, 1], [0, 1, 2, 3]]
    ids, valid = select_candidates(scores, "surviving", max_candidates=3)
    assert ids.shape == (2, 3)
    table = torch.tensor([[0.0, 1.0, 7.0, 7.0], [0.0, 1.0, 2.0, 4.0]])
    out = ValueGuidedProcessor(TableValue(table), policy="surviving", normalize="minmax")(PREFIX.repeat(2, 1), scores)
    torch.testing.assert_close(
        out - scores, torch.tensor([[0.0, 1, float("nan"), float("nan")], [0, 0.25, 0.5, 1]]), equal_nan=True
    )


def test_keeping_other_tokens():
    scores = torch.tensor([[3.0, 2.0, 1.0]])
    processor = ValueGuidedProcessor(TableValue(torch.ones(1, 3)), k=2, beta=10.0, mask_non_candidates=False)
    assert processor(PREFIX, scores)[0].tolist() == [13.0, 12.0, 1.0]
    assert scores[0].tolist() == [3.0, 2.0, 1.0], "the incoming scores are left alone"


@pytest.mark.parametrize(("mode", "want"), [("softmax", [0.5, 0.5, 0.0]), ("minmax", [0.5, 0.5, 0.5])])
def test_flat_rows(mode, want):
    values = torch.tensor([[2.0, 2.0, 9.0]])
    valid = torch.tensor([[True, True, False]])
    got = normalize_values(values, valid, mode)[0]
    assert got.tolist() == pytest.approx(want)


def test_nan_reward_names_the_step():
    table = torch.zeros(2, 5)
    table[1, 3] = float("nan")
    prompt = torch.tensor([[1, 2, 3], [1, 2, 3]])
    processor = ValueGuidedProcessor(TableValue(table), k=5, prompt_ids=prompt)
    with pytest.raises(ValueError, match=r"step 2 \(after 5 tokens\), row 1, candidate token 3"):
        processor(torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 5))


@pytest.mark.parametrize(("mode", "row"), [("minmax", 0), ("none", 1), ("softmax", 1)])
def test_infinite_values_that_leave_no_number_are_an_error(mode, row):
    table = torch.tensor([[0.5, -torch.inf, 0.0], [torch.inf, 0.0, 1.0]])
    processor = ValueGuidedProcessor(TableValue(table), k=3, normalize=mode, beta=2.0)
    with pytest.raises(ValueError, match=f"infinite or NaN at the step .*, row {row}, .*normalize='{mode}'"):
        processor(PREFIX.repeat(2, 1), torch.zeros(2, 3))
    if mode == "none":
        banned = ValueGuidedProcessor(TableValue(table[:1]), k=3, normalize=mode, beta=2.0)
        assert banned(PREFIX, torch.zeros(1, 3))[0].tolist() == [1.0, float("-inf"), 0.0]
    without = ValueGuidedProcessor(TableValue(table), k=3, normalize=mode, beta=0.0)
    assert without(PREFIX.repeat(2, 1), torch.zeros(2, 3)).eq(0).all()


def test_top_p_of_1_keeps_every_possible_token():
    """Summed in float32, tens of thousands of unlikely tokens would be lost."""
    scores = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    scores[:, 7] = float("-inf")
    _, valid = select_candidates(scores, "top_p", p=1.0)
    assert valid.sum(1).tolist() == [19_999, 19_999]


def test_value_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"\(1, 5\), got \(1,\)"):
        ValueGuidedProcessor(lambda ctx: torch.zeros(1), k=5)(PREFIX, torch.zeros(1, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "best"}, "policy must be one of top_k, top_p, surviving, got 'best'"),
        ({"k": 0}, "k >= 1, got 0"),
        ({"policy": "top_p"}, "p in .0, 1., got None"),
        ({"normalize": "z"}, "normalize must be one of clamp"),
        ({"max_candidates": 0}, "at least 1, got 0"),
        ({"k": 2.5}, "a whole number k >= 1, got 2.5"),
        ({"beta": float("nan")}, "beta must be a number of at most 1e.30 in size, got nan"),
        ({"beta": 1e39}, "beta must be a number of at most 1e.30"),
        ({"prompt_ids": PREFIX, "attention_mask": torch.ones(1, 3)}, r"\(1, 2\) and attention_mask \(1, 3\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ValueGuidedProcessor(TableValue(torch.zeros(1, 5)), **arguments)


def test_ids_that_the_value_cannot_score_are_no_candidates():
    """Logits wider than the reward model's embedding table (padded vocabularies)."""
    value = TableValue(torch.zeros(2, 3))
    value.vocab_limit = 3
    out = ValueGuidedProcessor(value, k=4)(PREFIX, torch.tensor([[0.0, 1.0, 2.0, 9.0]]))
    assert out[0].tolist() == [0.0, 1.0, 2.0, float("-inf")]
    processor = ValueGuidedProcessor(value, k=4, beta=0.0)
    nothing = torch.full((2, 4), float("-inf"))
    assert torch.equal(processor(PREFIX.repeat(2, 1), nothing), nothing)
    for lost in (torch.nan, float("-inf")):
        scores = torch.tensor([[0.0, 1.0, 2.0, 9.0], [lost, lost, lost, 9.0]])
        with pytest.raises(ValueError, match=r"row 1 has no candidate at the step after 2 tokens: .* the first 3 that"):
            processor(PREFIX.repeat(2, 1), scores)


def test_trace_and_any_callable():
    trace: list = []
    processor = ValueGuidedProcessor(
        lambda ctx: ctx.candidate_ids.float() / 4, k=2, beta=3.0, normalize="clamp", invert=True, trace=trace
    )
    processor(PREFIX, torch.tensor([[0.0, 5.0, 4.0, 1.0]]))
    (record,) = trace
    assert record.prefix_length == 2
    assert record.candidate_ids.tolist() == [[1, 2]]
    assert record.candidate_scores.tolist() == [[5.0, 4.0]]
    assert record.values.tolist() == [[0.25, 0.5]]
    assert record.normalized.tolist() == [[0.75, 0.5]]


def test_weighted_value_adds_up():
    one, two = TableValue(torch.tensor([[1.0, 0.0]])), TableValue(torch.tensor([[0.0, 2.0]]))
    one.vocab_limit, two.supports_batching = 2, False
    both = WeightedValue([(one, 0.5), (two, -1.0), (lambda ctx: ctx.candidate_ids.float(), 10.0)])
    assert both(StepContext(PREFIX, torch.tensor([[0, 1]]))).tolist() == [[0.5, 8.0]]
    assert both.vocab_limit == 2 and not both.supports_batching
    with pytest.raises(ValueError, match="at least one"):
        WeightedValue([])
    with pytest.raises(ValueError, match="weight 0 .* finite"):
        WeightedValue([(one, float("nan"))])


class TestPromptMask:
    PROMPTS = torch.tensor([[1, 1, 5], [1, 6, 7]])
    MASK = torch.tensor([[0, 0, 1], [0, 1, 1]])

    def test_rows_take_the_mask_of_their_prompt(self):
        mask = PromptMask(self.PROMPTS, self.MASK, 1, 2)
        prefix = torch.tensor([[1, 6, 7, 1], [1, 1, 5, 9], [1, 6, 7, 8]])
        assert mask.for_prefix(prefix).tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]

    def test_equal_prompts_with_other_masks_go_by_number(self):
        same = torch.tensor([[1, 1, 5], [1, 1, 5]])
        mask = PromptMask(same, torch.tensor([[0, 0, 1], [0, 1, 1]]), 1, 2)
        got = mask.for_prefix(torch.tensor([[1, 1, 5, 9]] * 4))
        assert got.tolist() == [[0, 0, 1, 1]] * 2 + [[0, 1, 1, 1]] * 2

    def test_another_prompt_is_read_from_its_tokens(self):
        mask = PromptMask(self.PROMPTS, self.MASK, 1, 2)
        assert mask.for_prefix(torch.tensor([[1, 9, 1, 9]])).tolist() == [[0, 1, 1, 1]]

    def test_pad_equal_to_eos_is_no_padding(self):
        assert PromptMask(None, None, 2, 2).for_prefix(torch.tensor([[2, 2, 3]])).tolist() == [[1, 1, 1]]

    def test_rewound_into_the_prompt(self):
        mask = PromptMask(self.PROMPTS, self.MASK, 1, 2)
        assert mask.for_prefix(torch.tensor([[1, 1], [1, 6]])).tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.5, 3.0, 40.0])
def test_best_only_finds_the_same_tokens_with_fewer_scores(beta, invert):
    """Against all candidates scored, over many steps of three rows; what is left out could not have won."""
    generator = torch.Generator().manual_seed(0)
    scored = 0
    table = torch.rand(3, 60, generator=generator) * 2 - 0.5
    value = TableValue(table)
    settings = {"k": 20, "beta": beta, "normalize": "clamp", "invert": invert}
    whole, best = (ValueGuidedProcessor(value, best_only=flag, **settings) for flag in (False, True))
    for step in range(40):
        scores = torch.randn(3, 60, generator=generator) * 2
        if step == 7:
            scores[1, 5:] = float("-inf")
        all_shifted = whole(PREFIX.repeat(3, 1), scores)
        before = len(best.value.seen)
        shifted = best(PREFIX.repeat(3, 1), scores)
        scored += sum(context.candidate_ids.size(1) for context in best.value.seen[before:])
        assert torch.equal(shifted.argmax(-1), all_shifted.argmax(-1))
        kept = shifted > float("-inf")
        assert torch.equal(shifted[kept], all_shifted[kept])
    assert scored <= {0.0: 800, 0.5: 400, 3.0: 790, 40.0: 800}[beta]


def test_best_only_scores_all_where_more_than_the_best_is_looked_at():
    scores = torch.arange(30.0, 0, -1).repeat(2, 1)
    value = TableValue(torch.rand(2, 30))
    for options, dtype in (({"trace": []}, torch.float32), ({}, torch.bfloat16)):
        processor = ValueGuidedProcessor(value, k=10, beta=1.0, normalize="clamp", best_only=True, **options)
        assert int((processor(PREFIX.repeat(2, 1), scores.to(dtype)) > float("-inf")).sum()) == 2 * 10
    with pytest.raises(ValueError, match="best_only needs normalize='clamp'"):
        ValueGuidedProcessor(value, k=10, normalize="minmax", best_only=True)
