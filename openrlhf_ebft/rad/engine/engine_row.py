"""One request in an engine's batch, as RAD sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openrlhf_ebft.rad.engine.prefix import StoredPrefix
from openrlhf_ebft.rad.engine.request import RADRequest
from openrlhf_ebft.rad.engine.trace import RequestTrace


@dataclass(frozen=True)
class RowTerm:
    """One reward of a request, resolved: `factor * reward` is added to a candidate's logit.

    Attributes:
        model: name of the reward model.
        factor: logit units, >= 0.
        invert: use 1 - reward.
        score_index, score_transform: how the model's output is read.
    """

    model: str
    factor: float
    invert: bool
    score_index: int
    score_transform: str


@dataclass(eq=False)
class EngineRow:
    """A request while it is in the batch.

    Attributes:
        request: its arguments.
        prompt: token ids.
        outputs: the engine's own list of the response's tokens; it grows while this row lives.
        stop_ids: tokens that end the request.
        is_greedy: only the best candidate matters, its distance from the others does not.
        terms: the rewards to sum; empty with an error.
        trace: where its steps are recorded, or None.
        error: why it cannot be steered (the engine then ends it), or None.
        tokens: prompt and response as of the last `refresh`.
        prefixes: stored prefix by reward model.
        least_gain: what the best candidate gained in the last steps, as a share of the most that it could;
            None before the first step.
    """

    request: RADRequest
    prompt: Sequence[int]
    outputs: Sequence[int]
    stop_ids: Sequence[int] = ()
    is_greedy: bool = False
    terms: tuple[RowTerm, ...] = ()
    trace: RequestTrace | None = None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    prefixes: dict[str, StoredPrefix] = field(default_factory=dict)
    least_gain: float | None = None

    def refresh(self, vocab_limit: int) -> bool:
        """Takes over the response's new tokens; False when older ones have changed, so that prefixes must start anew.

        Raises:
            ValueError: a token that the reward models do not know, or a placeholder instead of a token.
        """
        start = len(self.tokens)
        if start == 0:
            self.tokens += self.prompt
        seen = len(self.tokens) - len(self.prompt)
        kept = list(self.outputs[:seen]) == self.tokens[len(self.prompt) :]
        if not kept:
            del self.tokens[len(self.prompt) :]
            start, seen = len(self.tokens), 0
        self.tokens += self.outputs[seen:]
        for token in self.tokens[start:]:
            if not 0 <= token < vocab_limit:
                raise ValueError(
                    f"the text so far holds token id {token}, but the reward model knows ids 0 to {vocab_limit - 1}"
                )
        return kept
