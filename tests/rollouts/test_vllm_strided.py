"""vLLM and the block-parallel sampler on the same trees: equal greedy tokens, equal distributions."""

from __future__ import annotations

import torch

from openrlhf_ebft.config.sections import RolloutConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.rollouts.block_parallel import BlockParallelSampler
from tests.rollouts.requests import GREEDY
from tests.rollouts.test_block_parallel import StrideSettings, strided
from tests.rollouts.vllm_engines import start
from tests.tiny_models import tiny_llama

SAMPLES = 2000


def test_vllm_and_block_parallel_sample_the_same_trees(tmp_path):
    model = tiny_llama(tmp_path)
    engine = start(tmp_path, config=RolloutConfig(kv_cache_gib=0.25, block_size=32))
    try:
        settings = StrideSettings(4, 8, 6)
        requests = [
            strided(60, seed=1, n=2, settings=settings),
            strided(50, seed=2, documents=[20, 30], settings=settings),
        ]
        ours = iter(BlockParallelSampler(model).sample(requests, GREEDY))
        for rollout in engine.generate(requests, GREEDY):
            for group in rollout.completions:
                assert [c.token_ids for c in group] == [c.token_ids for c in next(ours)]
        _compare_first_tokens(model, engine)
    finally:
        engine.shutdown()


def _compare_first_tokens(model, engine):
    """Two-sample chi-square of first tokens at one anchor, and each sampler against the exact probabilities."""
    sampling = SamplingSettings(temperature=1.3, top_p=1.0, top_k=0, stop_token_ids=())
    request = strided(9, seed=3, n=SAMPLES, settings=StrideSettings(1, 8, 1))
    vllm = engine.generate([request], sampling)[0].completions[0]
    ours = BlockParallelSampler(model).sample([request], sampling)[0]
    counts = [torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=64) for group in (vllm, ours)]
    with torch.no_grad():
        logits = model(request.reference.token_ids[None, :8]).logits[0, -1]
    expected = torch.softmax(logits / sampling.temperature, -1) * SAMPLES
    common = expected >= 5
    wanted = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1e-9)])
    observed = [torch.cat([count[common], count[~common].sum()[None]]).float() for count in counts]
    freedom = int(common.sum())
    limit = freedom + 4 * (2 * freedom) ** 0.5
    for count in observed:
        assert float(((count - wanted) ** 2 / wanted).sum()) < limit
    total = (observed[0] + observed[1]).clamp(min=1)
    assert float(((observed[0] - observed[1]) ** 2 / total).sum()) < limit
