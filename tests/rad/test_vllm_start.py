"""What RAD refuses when vLLM starts, and model runner V2's interface, driven as its runner drives it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.rad.vllm_setup import engine_arguments, rad_entry, save_models
from tests.tiny_models import VOCAB, tiny_byte_tokenizer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rad-vllm-start")
    save_models(folder)
    return folder


def build(folder, device_or_state=None, rad=None, **changes):
    """The processor as a worker builds it, from vLLM's own configuration."""
    from vllm import EngineArgs

    from openrlhf_ebft.rad.vllm_processor import RADLogitsProcessor

    arguments = engine_arguments(folder, **changes)
    if rad is not None:
        arguments["additional_config"] = rad
    config = EngineArgs(**arguments).create_engine_config()
    return RADLogitsProcessor(config, device_or_state or torch.device("cpu"), False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline_parallel_size=2"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding",
        ),
    ],
)
def test_engines_that_cannot_be_steered_are_refused_by_name(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        build(folder, **changes)


def test_faulty_entries_are_refused_by_name(folder, tmp_path):
    with pytest.raises(ValueError, match="RAD needs its reward models"):
        build(folder, rad={})
    with pytest.raises(ValueError, match="rad.cache_tokens"):
        build(folder, rad={"rad": rad_entry(folder, cache_tokens=-1)})
    with pytest.raises(
        ValueError, match="cache_tokens=100 .* cannot hold one request of 128 tokens; give at least 128"
    ):
        build(folder, rad={"rad": rad_entry(folder, cache_tokens=100)})
    models = {"kind": {"path": str(folder / "kind"), "score_index": 3}}
    with pytest.raises(ValueError, match="rad.reward_models.kind.score_index=3 is outside its 1 output columns"):
        build(folder, rad={"rad": {"reward_models": models}})


def test_a_reward_model_with_another_vocabulary_is_refused_by_name(folder, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(folder / "kind", other)
    tiny_byte_tokenizer(other)
    with pytest.raises(ValueError, match="reward model 'other' .*: its vocabulary differs from the language model's"):
        build(folder, rad={"rad": {"reward_models": {"other": {"path": str(other)}}}})


def test_the_entry_may_come_from_a_command_line(folder):
    """`--additional-config` is JSON."""
    processor = build(folder, rad=json.loads(json.dumps({"rad": rad_entry(folder)})))
    assert sorted(processor.engine.scorers) == ["kind", "toxic"]
    assert not processor.is_argmax_invariant()


class RunnerV2:
    """The parts of model runner V2 that a logits processor meets, in the runner's order of calls, on the CPU.

    (The runner itself needs kernels that this machine does not have.)
    """

    def __init__(self, folder):
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState

        self.tokens = torch.zeros(4, 128, dtype=torch.int32)
        self.prompt, self.prefill = np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.int32)
        self.state = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=4,
            vocab_size=VOCAB,
            all_token_ids=SimpleNamespace(gpu=self.tokens),
            prompt_len=SimpleNamespace(np=self.prompt),
            prefill_len=SimpleNamespace(np=self.prefill),
            total_len=SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int32)),
        )
        self.processor = build(folder, self.state)
        self.length = [0] * 4

    def add(self, slot, prompt, extra, outputs=()):
        from vllm import SamplingParams

        known = [*prompt, *outputs]
        self.tokens[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.prompt[slot], self.prefill[slot] = len(prompt), len(known)
        self.length[slot] = len(known)
        return self.processor.add_request(slot, SamplingParams(temperature=0.0, extra_args=extra))

    def step(self, slots, logits, lengths=None):
        """Samples greedily for the slots in this order; `lengths` below a prompt's are chunks of it."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        lengths = lengths or [self.length[slot] for slot in slots]
        mapping = torch.tensor(slots)
        self.processor.apply_staged_writes()
        out = self.processor.apply(
            logits,
            LogitsContext(
                expanded_idx_mapping=mapping,
                idx_mapping=mapping,
                idx_mapping_np=np.array(slots),
                expanded_local_pos=torch.zeros(len(slots)),
                input_ids=torch.zeros(len(slots)),
                pos=torch.tensor(lengths) - 1,
                seq_lens_upper_bound_np=np.array(lengths),
            ),
        )
        for place, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if length >= self.prefill[slot]:
                self.tokens[slot, length] = int(out[place].argmax())
                self.length[slot] = length + 1
        return out


def test_model_runner_v2_gives_the_same_tokens_as_v1(folder):
    """Rows change places, a prompt comes in chunks, one request is preempted and returns in another slot."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    runner = RunnerV2(folder)
    extra = {"rad_beta": 8.0, "rad_top_k": 5}
    prompts = {0: [3, 4, 5], 1: [7] * 40, 2: [9, 8]}
    assert runner.add(0, prompts[0], extra)
    assert runner.add(1, prompts[1], extra | {"rad_reward_model": "toxic"})
    assert not runner.add(2, prompts[2], None)
    scores = {slot: [torch.randn(VOCAB) for _ in range(9)] for slot in range(3)}

    def at(slot):
        return scores[slot][runner.length[slot] - len(prompts[slot])].clone()

    untouched = at(2)
    out = runner.step([1, 0, 2], torch.stack([torch.randn(VOCAB), at(0), at(2)]), lengths=[16, 3, 2])
    assert torch.equal(out[2], untouched)
    for order in ([0, 1, 2], [1, 2, 0], [0, 1]):
        runner.step(order, torch.stack([at(slot) for slot in order]))
    outputs = runner.tokens[1, 40 : runner.length[1]].tolist()
    runner.step([0, 2], torch.stack([at(0), at(2)]))  # slot 1 is preempted ...
    runner.add(3, prompts[1], extra | {"rad_reward_model": "toxic"}, outputs)  # ... and resumed in slot 3
    prompts[3], scores[3] = prompts[1], scores[1]
    runner.step([3, 0], torch.stack([at(3), at(0)]))
    runner.step([0, 3], torch.stack([at(0), at(3)]))
    got = {slot: runner.tokens[slot, len(prompts[slot]) : runner.length[slot]].tolist() for slot in (0, 2, 3)}

    v1 = build(folder)
    for slot, name in ((0, "kind"), (2, None), (3, "toxic")):
        tokens: list[int] = []
        params = SamplingParams(extra_args=None if name is None else extra | {"rad_reward_model": name})
        v1.update_state(BatchUpdate(1, removed=[], added=[(0, params, prompts[slot], tokens)], moved=[]))
        while len(tokens) < len(got[slot]):
            row = scores[slot][len(tokens)].clone()[None]
            tokens.append(int(v1.apply(row).argmax()))
        assert tokens == got[slot]
    assert len(got[3]) > len(outputs)
    runner.step([2], torch.randn(1, VOCAB))
    assert [scorer.pool.used for scorer in runner.processor.engine.scorers.values()] == [0, 0]


def test_model_runner_v2_finds_the_processor(folder):
    """vLLM's own loader of that runner accepts the class and uses its check of request arguments."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    from openrlhf_ebft.rad.vllm_processor import PROCESSOR

    validate = build_custom_logits_processors_params_validator([PROCESSOR])
    validate(SamplingParams(extra_args={"rad_beta": 1.0}))
    with pytest.raises(VLLMValidationError, match="rad_beta must be a number"):
        validate(SamplingParams(extra_args={"rad_beta": "x"}))
