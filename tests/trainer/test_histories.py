"""Rounds of sampling: one for all turns on the data's history, one a turn on the policy's own."""

import torch

from openrlhf_ebft.core.experience import Rollout, RolloutRequest, SamplingSettings
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from openrlhf_ebft.trainer.histories import sample_references
from tests.models.test_policy import build
from tests.rollouts.test_block_parallel import alone
from tests.trees import make_reference

SAMPLING = SamplingSettings(temperature=0.8, top_p=1.0, top_k=0, stop_token_ids=(1, 9, 20, 33))


def requests():
    chats = [make_reference(16, [4, 9, 13], window=2, seed=1), make_reference(9, [3], window=3, seed=2)]
    return [RolloutRequest(chat, num_samples=2, seed=10 + number) for number, chat in enumerate(chats)]


class Engine:
    """The real sampler behind the engine group's call; remembers what it was asked."""

    def __init__(self):
        self.model = build("llama", "sdpa")
        self.rounds = []

    def generate(self, asked):
        self.rounds.append(list(asked))
        groups = iter(BlockParallelSampler(self.model).sample(asked, SAMPLING))
        return [Rollout(r.reference.example_id, tuple(next(groups) for _ in r.reference.anchors), 0) for r in asked]


def test_on_the_datas_history_everything_is_sampled_at_once():
    engine, asked = Engine(), requests()
    references, rollouts = sample_references(engine.generate, asked, "ground_truth")
    assert [round_ == asked for round_ in engine.rounds] == [True]
    assert references == [request.reference for request in asked]
    assert [len(rollout.completions) for rollout in rollouts] == [3, 1]


def test_on_its_own_history_every_turn_continues_the_first_completion_before():
    engine, asked = Engine(), requests()
    references, rollouts = sample_references(engine.generate, asked, "own")
    first, second = (request.reference.example_id for request in asked)
    names = [reference.example_id for reference in references]
    assert names == [f"{first}/turn-0", f"{second}/turn-0", f"{first}/turn-1", f"{first}/turn-2"]
    assert [rollout.example_id for rollout in rollouts] == names
    assert [len(round_) for round_ in engine.rounds] == [2, 1, 1]
    assert len({request.seed for round_ in engine.rounds for request in round_}) == 4
    chat = asked[0].reference.token_ids.tolist()
    own = [rollouts[i].completions[0][0] for i in (0, 2)]
    said = [list(c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids) for c in own]
    assert references[3].token_ids[: int(references[3].anchors[0])].tolist() == (
        chat[:4] + said[0] + chat[6:9] + said[1] + chat[11:13]
    )
    for request, rollout in zip((r for round_ in engine.rounds for r in round_), rollouts, strict=True):
        expected = [tokens for tokens, _ in alone(engine.model, request, SAMPLING)[0]]
        assert [completion.token_ids for completion in rollout.completions[0]] == expected
    assert torch.equal(references[3].token_ids[-2:], asked[0].reference.token_ids[13:15])
