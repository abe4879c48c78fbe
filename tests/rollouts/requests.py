"""Small rollout requests and the transformers side of comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from openrlhf_ebft.core.experience import Reference, RolloutRequest, SamplingSettings

SAMPLED = SamplingSettings(temperature=0.7, top_p=1.0, top_k=0, stop_token_ids=(1,))
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, stop_token_ids=())


def request(
    tokens: Sequence[int], anchors: Sequence[int], *, new: int = 8, n: int = 1, seed: int = 5, name: str = "ex"
) -> RolloutRequest:
    """A request with the same completion limit at every anchor."""
    reference = Reference(
        example_id=name,
        token_ids=torch.tensor(tokens),
        anchors=torch.tensor(anchors),
        window_lengths=torch.ones(len(anchors), dtype=torch.int64),
        max_new_tokens=torch.full((len(anchors),), new),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
    )
    return RolloutRequest(reference, num_samples=n, seed=seed)


def token_logprobs(model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """(L - 1,) log-probabilities of tokens 1.. under one plain forward pass."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def train_steps(model: PreTrainedModel, steps: int = 2) -> None:
    """A few large optimizer steps on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(3, model.config.vocab_size, (4, 20), generator=generator)
        logits = model(ids).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
