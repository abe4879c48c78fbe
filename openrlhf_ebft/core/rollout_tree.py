"""The rollout tree: a reference sequence, computed once, and the completions that branch off at its anchors.

Shape letters: S reference tokens, A anchors, n completions of an anchor, B tokens of all branches, T = S + B.
Layout: the reference first, then the branches anchor by anchor, sample by sample, without padding. Only this class
knows the layout; everything else asks it for index tensors. Definitions: "Matching Features, Not Tokens"
(arXiv 2603.12248).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from openrlhf_ebft.core.experience import Reference, Rollout


@dataclass(frozen=True, eq=False)
class RolloutTree:
    """One reference with its completions.

    `branch_tokens` (B,) int64 holds the completions' tokens in layout order, `branch_lengths` (A, n) int64 their
    lengths, `sampler_logprobs` (B,) float32 the sampler's log-probabilities.
    """

    reference: Reference
    branch_tokens: Tensor
    branch_lengths: Tensor
    sampler_logprobs: Tensor

    def __post_init__(self) -> None:
        self.reference.check()
        total = int(self.branch_lengths.sum())
        if self.branch_lengths.shape[0] != self.num_anchors:
            raise ValueError(
                f"{self.example_id}: completions for {self.branch_lengths.shape[0]} anchors, "
                f"but the reference has {self.num_anchors}"
            )
        if total != self.branch_tokens.numel() or total != self.sampler_logprobs.numel():
            raise ValueError(
                f"{self.example_id}: branch lengths add up to {total} tokens, but there are "
                f"{self.branch_tokens.numel()} tokens and {self.sampler_logprobs.numel()} log-probs"
            )

    @classmethod
    def from_rollout(cls, reference: Reference, rollout: Rollout) -> RolloutTree:
        """Builds the tree from sampled token ids. Raises ValueError if anchors or sample counts do not match."""
        if rollout.example_id != reference.example_id:
            raise ValueError(f"rollout of {rollout.example_id!r} does not belong to reference {reference.example_id!r}")
        counts = {len(group) for group in rollout.completions}
        if len(counts) > 1:
            raise ValueError(f"{reference.example_id}: anchors have different numbers of completions: {sorted(counts)}")
        branches = [completion for group in rollout.completions for completion in group]
        lengths = [len(branch.token_ids) for branch in branches]
        if 0 in lengths:
            raise ValueError(f"{reference.example_id}: completion {lengths.index(0)} has no token")
        return cls(
            reference=reference,
            branch_tokens=torch.tensor([t for b in branches for t in b.token_ids], dtype=torch.long),
            branch_lengths=torch.tensor(lengths, dtype=torch.long).view(len(rollout.completions), -1),
            sampler_logprobs=torch.tensor([p for b in branches for p in b.logprobs], dtype=torch.float32),
        )

    @classmethod
    def without_branches(cls, reference: Reference) -> RolloutTree:
        """A tree that is only its reference, for supervised steps and held-out cross-entropy."""
        return cls(
            reference=reference,
            branch_tokens=torch.empty(0, dtype=torch.long),
            branch_lengths=torch.empty(len(reference.anchors), 0, dtype=torch.long),
            sampler_logprobs=torch.empty(0),
        )

    def without_last_tokens(self) -> RolloutTree:
        """The tree without each branch's last token, which predicts nothing: what a policy has to compute.

        Raises ValueError when a branch has no token.
        """
        if bool((self.branch_lengths == 0).any()):
            raise ValueError(f"{self.example_id}: a completion without tokens has no last one to leave out")
        starts = torch.cumsum(self.branch_lengths.flatten(), 0) - 1
        keep = torch.ones_like(self.branch_tokens, dtype=torch.bool)
        keep[starts] = False
        return RolloutTree(
            self.reference, self.branch_tokens[keep], self.branch_lengths - 1, self.sampler_logprobs[keep]
        )

    @property
    def example_id(self) -> str:
        return self.reference.example_id

    @property
    def num_reference_tokens(self) -> int:
        return self.reference.token_ids.numel()

    @property
    def num_anchors(self) -> int:
        return self.reference.anchors.numel()

    @property
    def num_samples(self) -> int:
        return self.branch_lengths.shape[1]

    @property
    def num_branches(self) -> int:
        return self.branch_lengths.numel()

    @property
    def device(self) -> torch.device:
        return self.branch_tokens.device

    def to(self, device: torch.device) -> RolloutTree:
        """The same tree with all tensors on `device`."""
        return RolloutTree(
            self.reference.to(device),
            self.branch_tokens.to(device),
            self.branch_lengths.to(device),
            self.sampler_logprobs.to(device),
        )

    def _arange(self, *bounds: int) -> Tensor:
        return torch.arange(*bounds, device=self.device)

    def __len__(self) -> int:
        """Number of tokens T."""
        return self.num_reference_tokens + self.branch_tokens.numel()

    @cached_property
    def branch_of_token(self) -> Tensor:
        """(B,) index anchor * n + sample of the branch that each branch token belongs to."""
        lengths = self.branch_lengths.flatten()
        return torch.repeat_interleave(self._arange(lengths.numel()), lengths)

    @cached_property
    def branch_starts(self) -> Tensor:
        """(A * n,) where each branch begins among the branch tokens."""
        lengths = self.branch_lengths.flatten()
        return torch.cumsum(lengths, 0) - lengths

    @cached_property
    def step_of_token(self) -> Tensor:
        """(B,) place g of each branch token in its branch."""
        return self._arange(self.branch_tokens.numel()) - self.branch_starts[self.branch_of_token]

    @cached_property
    def anchor_of_token(self) -> Tensor:
        """(B,) anchor position a of each branch token."""
        return self.reference.anchors.repeat_interleave(max(self.num_samples, 1))[self.branch_of_token]

    @cached_property
    def token_ids(self) -> Tensor:
        """(T,) reference tokens, then branch tokens."""
        return torch.cat([self.reference.token_ids, self.branch_tokens])

    @cached_property
    def document_of_token(self) -> Tensor:
        """(T,) document that each token stands for; a branch token stands for reference token a + g."""
        documents = self.reference.documents
        stands_for = (self.anchor_of_token + self.step_of_token).clamp(max=self.num_reference_tokens - 1)
        return torch.cat([documents, documents[stands_for]])

    @cached_property
    def position_ids(self) -> Tensor:
        """(T,) positions restart at every document; branch token g has the position of reference token a, plus g."""
        positions = self.reference.positions
        # An anchor behind the last token continues the last token's numbering.
        extended = torch.cat([positions, positions[-1:] + 1])
        return torch.cat([positions, extended[self.anchor_of_token] + self.step_of_token])

    @cached_property
    def predictors(self) -> Tensor:
        """(B,) tree index whose logits predict each branch token: reference token a - 1 for g = 0, else token g - 1."""
        own = self.num_reference_tokens + self._arange(self.branch_tokens.numel())
        return torch.where(self.step_of_token == 0, self.anchor_of_token - 1, own - 1)

    @cached_property
    def pruned_predictors(self) -> Tensor:
        """(B,) `predictors` as indices into the tree `without_last_tokens`."""
        return self.predictors - torch.where(self.step_of_token == 0, 0, self.branch_of_token)

    @cached_property
    def first_alike(self) -> Tensor:
        """(T,) tree index of the first token that is computed alike; reference tokens are their own.

        Tokens of two samples of an anchor are alike where the samples agree up to them.
        """
        own = self._arange(self.num_reference_tokens)
        if self.branch_tokens.numel() == 0:
            return own
        rows = torch.full((self.num_branches, int(self.branch_lengths.max())), -1, device=self.device)
        rows[self.branch_of_token, self.step_of_token] = self.branch_tokens
        groups = rows.view(self.num_anchors, self.num_samples, -1)
        agree = (groups[:, :, None] == groups[:, None]).int().cumprod(-1)  # (A, n, n, L)
        sample = agree.argmax(dim=2).view_as(rows)[self.branch_of_token, self.step_of_token]  # the first that agrees
        branch = self.branch_of_token // self.num_samples * self.num_samples + sample
        return torch.cat([own, self.num_reference_tokens + self.branch_starts[branch] + self.step_of_token])

    @cached_property
    def supervised_tokens(self) -> Tensor:
        """(R,) reference indices that the cross-entropy covers: in the loss mask, and not the first of a document."""
        documents = self.reference.documents
        has_predictor = torch.zeros_like(self.reference.loss_mask)
        has_predictor[1:] = documents[1:] == documents[:-1]
        return torch.nonzero(self.reference.loss_mask & has_predictor).flatten()

    @cached_property
    def reference_limits(self) -> Tensor:
        """(T,) how many reference tokens, counted from the first, each token may attend to at most."""
        return torch.cat([self._arange(1, self.num_reference_tokens + 1), self.anchor_of_token])

    @cached_property
    def branch_numbers(self) -> Tensor:
        """(T,) branch of each token; -1 for reference tokens."""
        return torch.cat([torch.full_like(self.reference.token_ids, -1), self.branch_of_token])

    def allowed(self) -> Tensor:
        """(T, T) bool: may query token (row) attend to key token (column)? algorithms.md, sections 2 and 3."""
        size, documents, counts = self.num_reference_tokens, self.document_of_token, self.step_of_token + 1
        mask = torch.zeros(len(self), len(self), dtype=torch.bool, device=self.device)
        mask[:, :size] = self._arange(size) < self.reference_limits[:, None]
        if self.reference.document_ids is not None:
            mask[:, :size] &= documents[:, None] == documents[:size]
        # Pairs of a branch are listed: comparing all T * T numbers would take ten times as long.
        query = torch.repeat_interleave(self._arange(size, len(self)), counts)
        key = query - self._arange(query.numel()) + torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        mask[query, key] = documents[query] == documents[key]
        return mask

    def completions(self) -> list[list[Tensor]]:
        """Token ids (g,) of every completion, [A][n]."""
        parts = iter(self.branch_tokens.split(self.branch_lengths.flatten().tolist()))
        return [[next(parts) for _ in range(self.num_samples)] for _ in range(self.num_anchors)]

    def branch_indices(self, branch: int) -> Tensor:
        """(a + g,) tree indices of one completion as an ordinary causal sequence: context, then its own tokens."""
        anchor = int(self.reference.anchors[branch // self.num_samples])
        own = torch.nonzero(self.branch_of_token == branch).flatten() + self.num_reference_tokens
        return torch.cat([self._arange(anchor), own])
