"""Typed records that cross process borders: references in, rollouts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference sequence with the anchors from which completions are sampled.

    S tokens, A anchors. Structured data has one anchor, at the end of the prompt.
    """

    example_id: str
    token_ids: Tensor  # (S,) int64: prompt + ground truth, or one packed document
    anchors: Tensor  # (A,) int64, ascending: the context of anchor a is token_ids[:a]
    window_lengths: Tensor  # (A,) int64, tokens: the ground truth of anchor a is token_ids[a : a + length]
    max_new_tokens: Tensor  # (A,) int64, tokens: limit of the completions of each anchor
    loss_mask: Tensor  # (S,) bool: tokens that the cross-entropy covers (token 0 has no predictor and never counts)
    document_ids: Tensor | None = None  # (S,) int64, non-decreasing: documents of a packed reference
    closings: Tensor | None = None  # (A,) int64: tokens at the end of each window that only close a turn (EOS); None: 0
    columns: tuple[Mapping[str, Any], ...] = ()  # of each document: the columns that reward.function asks for; (): none

    def to(self, device: torch.device) -> Reference:
        """The same reference with all tensors on `device`."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    @property
    def documents(self) -> Tensor:
        """(S,) int64 document of each token; zeros when there is only one."""
        return torch.zeros_like(self.token_ids) if self.document_ids is None else self.document_ids

    def columns_at(self, anchor: int) -> Mapping[str, Any]:
        """The columns of the row that the window at position `anchor` comes from."""
        if not self.columns:
            return {}
        return self.columns[0 if self.document_ids is None else int(self.document_ids[anchor])]

    @property
    def positions(self) -> Tensor:
        """(S,) int64 position ids, which restart at every document."""
        documents = self.documents
        index = torch.arange(documents.numel(), device=documents.device)
        first = torch.ones_like(documents, dtype=torch.bool)
        first[1:] = documents[1:] != documents[:-1]
        return index - torch.cummax(torch.where(first, index, 0), 0).values

    def check(self) -> None:
        """Raises ValueError, with both numbers, when anchors, windows, masks or documents do not fit the tokens."""
        size, anchors, windows = self.token_ids.numel(), self.anchors, self.window_lengths
        if anchors.numel() == 0:
            raise ValueError(f"{self.example_id}: a reference needs at least one anchor")
        if int(anchors.min()) < 1 or int(anchors.max()) > size:
            raise ValueError(
                f"{self.example_id}: anchors must lie in 1..{size} (a context needs a token), got {anchors.tolist()}"
            )
        if windows.shape != anchors.shape or bool((anchors + windows > size).any()) or int(windows.min()) < 0:
            raise ValueError(
                f"{self.example_id}: windows {windows.tolist()} at anchors {anchors.tolist()} "
                f"do not fit a reference of {size} tokens"
            )
        if self.loss_mask.numel() != size:
            raise ValueError(f"{self.example_id}: loss mask of {self.loss_mask.numel()} for {size} tokens")
        documents = self.document_ids
        if documents is not None and (documents.numel() != size or bool((documents[1:] < documents[:-1]).any())):
            raise ValueError(f"{self.example_id}: document ids must be {size} non-decreasing numbers")


@dataclass(frozen=True)
class SamplingSettings:
    """Every sampling field, so that no model folder's generation config can fill a gap."""

    temperature: float  # 0 is greedy
    top_p: float  # 1 is off
    top_k: int  # candidates kept; 0 is off
    stop_token_ids: tuple[int, ...]  # a sampled stop token ends the completion and stays its last token


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """Sample `num_samples` completions at every anchor of `reference`."""

    reference: Reference
    num_samples: int
    seed: int  # base seed of this reference and step; see core/seeding.py


@dataclass(frozen=True)
class Completion:
    """One sampled completion of an anchor: g tokens, exactly as sampled."""

    token_ids: tuple[int, ...]  # (g,), g >= 1; a stop token, when sampled, is the last
    logprobs: tuple[float, ...]  # (g,) natural-log probabilities under the sampler at the sampling temperature
    finish_reason: FinishReason  # "length": the token limit cut it off


@dataclass(frozen=True)
class Rollout:
    """All completions of one reference."""

    example_id: str
    completions: tuple[tuple[Completion, ...], ...]  # [A][n]
    weight_version: int  # optimizer steps behind the weights that sampled it
    cached_tokens: int = 0  # prompt tokens that came from the engine's prefix cache
