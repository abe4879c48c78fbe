"""A step's candidates, and which of them need a reward at all.

A greedy request takes the candidate with the highest `logit + shift`, and a shift is between 0 and the sum of its
factors. A candidate whose logit plus that sum stays below the best one found so far cannot be taken, whatever its
reward: it needs no forward. How many that are is known only afterwards, so a step scores as many as the request's last
steps suggest, and in a second forward those that this guess has left out wrongly. The tokens are the same as without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openrlhf_ebft.rad.contenders import ABOVE, least_gain
from openrlhf_ebft.rad.engine.engine_row import EngineRow


@dataclass(eq=False)
class Choice:
    """A row's candidates in one step.

    Attributes:
        index: the row's place in the logits.
        row: the request.
        candidates: K token ids, best logit first.
        most: no shift of this row is larger; inf when every candidate must be scored.
        scored: number of candidates that have their rewards.
        wanted: number that are to have them after the next forward.
        shift: [scored] float32 to be added; None as long as no reward model has any part in it.
        rewards: by reward model, [K] in [0, 1]; only with a trace.
    """

    index: int
    row: EngineRow
    candidates: list[int]
    most: float
    scored: int = 0
    wanted: int = 0
    shift: torch.Tensor | None = None
    rewards: dict[str, torch.Tensor] | None = None


@dataclass
class Group:
    """Rows with the same number of candidates: ids, valid and scores (logits, best first) are [R, K]."""

    choices: list[Choice]
    ids: torch.Tensor
    valid: torch.Tensor
    scores: torch.Tensor

    def shifts(self) -> torch.Tensor:
        """[R, K] float32; -inf for candidates that were left out."""
        k, device = self.ids.size(1), self.scores.device
        zero = torch.zeros(k, device=device)
        rows = [zero if choice.shift is None else choice.shift.to(device) for choice in self.choices]
        return torch.stack([torch.nn.functional.pad(row, (0, k - row.numel()), value=float("-inf")) for row in rows])

    def _set_wanted(self, certain: torch.Tensor) -> None:
        """Asks for all candidates that could still beat a certain value [R]; at least one."""
        most = torch.tensor([choice.most for choice in self.choices], device=self.scores.device)
        counts = (self.scores + most[:, None] >= certain[:, None]).sum(1).tolist()
        for choice, count in zip(self.choices, counts, strict=True):
            needs_all = choice.most == float("inf")
            choice.wanted = len(choice.candidates) if needs_all else max(count, 1)


def most_shift(row: EngineRow) -> float:
    """The largest shift of a row, inf when its distribution and not only its best token is wanted."""
    total = sum(term.factor for term in row.terms) * ABOVE
    return total if row.is_greedy and row.trace is None and total > 0 else float("inf")


def plan_first(groups: list[Group]) -> None:
    """Sets how many candidates of every row the first forward scores."""
    for group in groups:
        gains = [_sure_gain(choice) for choice in group.choices]
        group._set_wanted(group.scores[:, 0] + torch.tensor(gains, device=group.scores.device))


def _sure_gain(choice: Choice) -> float:
    """What the best candidate is believed to gain over the best logit."""
    least = choice.row.least_gain
    return 0.0 if least is None else choice.most * least


def plan_rest(groups: list[Group]) -> list[Choice]:
    """The rows that need a second forward; learns from the first one."""
    late = []
    for group in groups:
        if all(choice.most == float("inf") for choice in group.choices):
            continue
        best = (group.scores + group.shifts()).max(dim=1).values
        group._set_wanted(best)
        gains = (best - group.scores[:, 0]).tolist()
        for choice, gain in zip(group.choices, gains, strict=True):
            if choice.most == float("inf") or choice.row.error is not None:
                continue
            choice.row.least_gain = least_gain(choice.row.least_gain, gain / choice.most)
            if choice.wanted > choice.scored:
                late.append(choice)
    return late
