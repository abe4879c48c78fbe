"""Samples all completions of all anchors at once: the reference is prefilled once and shared, never copied.

Samples that agree so far are computed once, as one node. Shape letters: b references, S their longest prefix,
n samples, N branches of all references, U nodes of all references, R nodes of a reference, V key/value heads,
d head size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf_ebft.core.branch_attention import BranchBias, ScoreRule, attend_branches
from openrlhf_ebft.core.experience import Completion, Reference, RolloutRequest, SamplingSettings
from openrlhf_ebft.core.packed_copies import PackedCopies
from openrlhf_ebft.core.seeding import completion_seed
from openrlhf_ebft.core.split_attention import BranchPlaces
from openrlhf_ebft.models.policy import LogitsHead
from openrlhf_ebft.models.split_attention import LayerStates, ReferenceAttention, split_attention
from openrlhf_ebft.rollouts.branch_nodes import BranchNodes
from openrlhf_ebft.rollouts.node_cache import NodeCache
from openrlhf_ebft.rollouts.sampling import draw_tokens, draw_uniforms

# Bounds of what is sampled together; one request alone may exceed them.
_MAX_OWN_TOKENS = 16384  # branches * steps: the branches' key/value cache
_MAX_REFERENCE_TOKENS = 8192
_HEAD_ROWS = 256  # rows whose logits exist at one time


class DecodingLayout:
    """Keys and values of references and branches, and the attention of both phases (see `TreeLayout`).

    The first forward pass holds the references, each later one the newest token of every node.
    """

    def __init__(self, places: BranchPlaces) -> None:
        self._places = places
        self._step: int | None = None  # None: the references are being read
        self._attend_reference = ReferenceAttention(places)
        self._reference: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: (b, V, S, d)
        self._nodes = NodeCache()
        self._biases: dict[int | None, BranchBias] = {}  # of this step, by window

    @property
    def reference_positions(self) -> Tensor:
        """(b, S) position ids of the references."""
        return self._places.positions[:, :-1]

    def next_step(self, anchors: Tensor, parents: Tensor) -> Tensor:
        """Moves on by a token.

        Args:
            anchors: (b, R) int64 anchor of each node.
            parents: (b, R) int64 the node of the last step that it goes on from.

        Returns:
            (b, R) position ids of the nodes' newest tokens.
        """
        self._step = 0 if self._step is None else self._step + 1
        self._places = replace(self._places, anchors=anchors)
        self._nodes.next_step(parents)
        self._biases.clear()
        return self._places.query_positions(self._steps())[..., 0]

    def attend(self, layer: int, states: LayerStates, rule: ScoreRule) -> Tensor:
        """See `TreeLayout`."""
        query, key, value = states
        if self._step is None:
            self._reference[layer] = (key, value)
            return self._attend_reference(states, rule)
        bias = self._bias(rule.window, query.dtype)
        return attend_branches(query, self._reference[layer], self._nodes.extend(layer, key, value), bias, rule)

    def _steps(self) -> Tensor:
        return torch.tensor([self._step], device=self._places.anchors.device)

    def _bias(self, window: int | None, dtype: torch.dtype) -> BranchBias:
        if window not in self._biases:
            assert self._step is not None
            masks = self._places.allowed(self._steps(), self._step + 1, window)
            self._biases[window] = BranchBias.of(*masks, dtype)
        return self._biases[window]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The N branches of a batch, request by request, anchor by anchor, sample by sample; all on the CPU."""

    group: Tensor  # (N,) anchor, counted through the batch
    limits: Tensor  # (N,) tokens
    seeds: list[int]

    @classmethod
    def of(cls, requests: Sequence[RolloutRequest]) -> _Rows:
        samples = torch.cat([torch.full((len(r.reference.anchors),), r.num_samples) for r in requests])
        limits = torch.cat([request.reference.max_new_tokens.cpu() for request in requests])
        seeds = [
            completion_seed(request.seed, anchor, sample)
            for request in requests
            for anchor in range(len(request.reference.anchors))
            for sample in range(request.num_samples)
        ]
        group = torch.repeat_interleave(torch.arange(len(samples)), samples)
        return cls(group, limits[group], seeds)


class BlockParallelSampler:
    """Decodes every branch of a batch of references side by side, with one forward pass a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` must take split attention (`takes_split_attention`)."""
        self._model = model
        self._head = LogitsHead(model)
        self._packed = PackedCopies(model)

    @torch.no_grad()
    def sample(self, requests: Sequence[RolloutRequest], sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
        """Completions of every anchor of every request, in their order.

        A completion depends on its context, seed and settings alone, not on what is sampled beside it.
        """
        groups: list[list[tuple[Completion, ...]]] = [[] for _ in requests]
        batches = list(_batches(requests))
        passes = sum(max(_size(requests[i])[2] for i in numbers) for numbers in batches)
        with split_attention(self._model), self._packed.in_use(passes):
            for numbers in batches:
                chosen = [requests[i] for i in numbers]
                flat = iter(self._sample_batch(chosen, sampling))
                for number, request in zip(numbers, chosen, strict=True):
                    count = range(request.num_samples)
                    groups[number] = [tuple(next(flat) for _ in count) for _ in request.reference.anchors]
        return [group for request_groups in groups for group in request_groups]

    def _sample_batch(self, requests: Sequence[RolloutRequest], sampling: SamplingSettings) -> list[Completion]:
        rows = _Rows.of(requests)
        steps = int(rows.limits.max())
        uniforms = draw_uniforms(rows.seeds, steps)
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
        references = [_prefix(request.reference) for request in requests]
        places = BranchPlaces.collate(references, [request.num_samples for request in requests])
        layout = DecodingLayout(_to_device(places, self._model.device))
        states = self._prefill(references, layout)
        nodes, node, running = BranchNodes.at_anchors(requests), rows.group, torch.arange(len(rows.seeds))
        tokens = torch.zeros(len(rows.seeds), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(rows.seeds), steps)
        lengths = torch.zeros_like(rows.limits)
        stopped = torch.zeros(len(rows.seeds), dtype=torch.bool)
        for step in range(steps):
            drawn, logprobs[running, step] = self._draw(states, node, uniforms[running, step], sampling)
            tokens[running, step] = drawn
            lengths[running] += 1
            stopped[running] = torch.isin(drawn, stop)
            goes_on = ~stopped[running] & (lengths[running] < rows.limits[running])
            if not bool(goes_on.any()):
                break
            running = running[goes_on]
            nodes, node = nodes.extend(node[goes_on], drawn[goes_on])
            states = self._decode(nodes, layout)
        return [
            Completion(
                tuple(tokens[row, :length].tolist()),
                tuple(logprobs[row, :length].tolist()),
                "stop" if stopped[row] else "length",
            )
            for row, length in enumerate(lengths.tolist())
        ]

    def _prefill(self, references: Sequence[Reference], layout: DecodingLayout) -> Tensor:
        """Reads the references, right-padded; returns the states (anchors of all, D) that predict the first tokens."""
        ids = torch.zeros(len(references), max(len(r.token_ids) for r in references), dtype=torch.int64)
        for row, reference in enumerate(references):
            ids[row, : len(reference.token_ids)] = reference.token_ids
        states = self._forward(ids, layout.reference_positions, layout)
        return torch.cat([states[row, r.anchors.to(states.device) - 1] for row, r in enumerate(references)])

    def _decode(self, nodes: BranchNodes, layout: DecodingLayout) -> Tensor:
        """Reads the newest tokens of the nodes; returns the states (U, D) that predict the next ones."""
        device = self._model.device
        anchors, parents = nodes.grid(nodes.anchor, fill=1), nodes.grid(nodes.parent, fill=0)
        positions = layout.next_step(anchors.to(device), parents.to(device))
        states = self._forward(nodes.grid(nodes.token, fill=0), positions, layout)
        return states[nodes.tree.to(device), nodes.slot.to(device)]

    def _forward(self, ids: Tensor, positions: Tensor, layout: DecodingLayout) -> Tensor:
        output = self._model.base_model(
            input_ids=ids.to(self._model.device), position_ids=positions, use_cache=False, tree_layout=layout
        )
        return output.last_hidden_state

    def _draw(
        self, states: Tensor, source: Tensor, uniforms: Tensor, sampling: SamplingSettings
    ) -> tuple[Tensor, Tensor]:
        """Tokens (N,) and log-probabilities (N,) on the CPU; branch i draws from states[source[i]]."""
        order = torch.argsort(source, stable=True)
        source, uniforms = source[order], uniforms[order]
        tokens, logprobs = torch.empty_like(source), torch.empty(len(source))
        for start in range(0, len(states), _HEAD_ROWS):
            logits = self._head(states[start : start + _HEAD_ROWS])
            first, last = torch.searchsorted(source, torch.tensor([start, start + _HEAD_ROWS])).tolist()
            part = (source[first:last] - start).to(logits.device)
            drawn = draw_tokens(logits, uniforms[first:last], sampling, part)
            tokens[order[first:last]], logprobs[order[first:last]] = drawn[0].cpu(), drawn[1].cpu()
        return tokens, logprobs


def _prefix(reference: Reference) -> Reference:
    """The part that completions see: tokens behind the last anchor say only which document they belong to."""
    if reference.document_ids is not None:
        return reference
    size = int(reference.anchors.max())
    windows = torch.zeros_like(reference.window_lengths)
    return replace(
        reference,
        token_ids=reference.token_ids[:size],
        loss_mask=reference.loss_mask[:size],
        window_lengths=windows,
    )


def _to_device(places: BranchPlaces, device: torch.device) -> BranchPlaces:
    documents = None if places.documents is None else places.documents.to(device)
    return BranchPlaces(
        places.anchors.to(device), places.reference_lengths.to(device), documents, places.positions.to(device)
    )


def _batches(requests: Sequence[RolloutRequest]) -> Iterator[list[int]]:
    """Request numbers that are sampled together: similar sizes, padded size within the limits, at least one."""
    sizes = [_size(request) for request in requests]
    batch: list[int] = []
    for number in sorted(range(len(requests)), key=lambda i: (sizes[i], i)):
        together = [*batch, number]
        reference, branches, steps = (max(sizes[i][part] for i in together) for part in range(3))
        own = len(together) * branches * steps
        if batch and (own > _MAX_OWN_TOKENS or len(together) * reference > _MAX_REFERENCE_TOKENS):
            yield batch
            together = [number]
        batch = together
    if batch:
        yield batch


def _size(request: RolloutRequest) -> tuple[int, int, int]:
    """(tokens of the context, branches, steps)."""
    reference = request.reference
    branches = len(reference.anchors) * request.num_samples
    return int(reference.anchors.max()), branches, int(reference.max_new_tokens.max())
