"""Comparison of a scorer's scores with full forwards over prefix + candidate: at start, and in every step on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from openrlhf_ebft.rad.cached_value import score_difference, score_tolerance
from openrlhf_ebft.rad.engine.prefix import StoredPrefix
from openrlhf_ebft.rad.engine.score_row import ScoreRow
from openrlhf_ebft.rad.reward_model_value import RewardModelValue
from openrlhf_ebft.rad.scoring_path import FORWARD_FAULTS
from openrlhf_ebft.rad.values import StepContext

if TYPE_CHECKING:
    from openrlhf_ebft.rad.engine.scorer import PrefixScorer


def allowed_difference(dtype: torch.dtype) -> float:
    """What two correct computations may differ by: matrix products of other shapes round differently.

    Measured in float32: 1e-5 for a model of 30 blocks; a wrong mask or position changes scores by 1e-3 and more.
    """
    return 1e-4 if torch.finfo(dtype).bits >= 32 else score_tolerance(dtype)


def full_scores(scorer: PrefixScorer, row: ScoreRow) -> torch.Tensor:
    """Scores [K] of a row, each from a forward over all of prefix + candidate."""
    value = RewardModelValue(
        scorer.reward_model,
        score_index=row.score_index,
        score_transform=row.score_transform,
        max_length=scorer.max_length,
    )
    step = StepContext(torch.tensor([row.tokens]), torch.tensor([row.candidates]))
    return value.score(step)[0]


def check_step(scorer: PrefixScorer, rows: list[ScoreRow], scores: torch.Tensor) -> None:
    """Raise RuntimeError when a score is not that of a full forward."""
    limit = allowed_difference(scorer.dtype)
    for row, got in zip(rows, scores.split([len(row.candidates) for row in rows]), strict=True):
        if row.refused:
            continue
        want = full_scores(scorer, row)
        worst = score_difference(got.cpu(), want.cpu())
        if worst > limit:
            raise RuntimeError(
                f"scores differ from a full forward by {worst:.3g} (limit {limit:.3g}) at a prefix of "
                f"{len(row.tokens)} tokens: {got.tolist()}, full {want.tolist()}"
            )


def check_small_steps(scorer: PrefixScorer) -> None:
    """Three short steps of two rows; raises ValueError when this model cannot be scored from a cache of blocks."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, scorer.vocab_limit, (2, 8), generator=generator).tolist()
    limit = allowed_difference(scorer.dtype)
    prefixes = [StoredPrefix(), StoredPrefix()]
    for length in (4, 5, 6):
        if scorer.max_length is not None and length + 1 >= scorer.max_length:
            break
        # The second candidate is the row's next token.
        rows = [
            ScoreRow(prefix, words[: length + shift], [words[7], words[length + shift], words[0]], 0, "none")
            for shift, (prefix, words) in enumerate(zip(prefixes, text, strict=True))
        ]
        try:
            scores = scorer.score(rows)
        except FORWARD_FAULTS as fault:
            first = str(fault).splitlines()[0][:200] if str(fault) else ""
            raise ValueError(f"a short cached forward failed ({type(fault).__name__}: {first})") from fault
        gap = score_difference(scores.cpu(), torch.cat([full_scores(scorer, row) for row in rows]).cpu())
        if gap > limit:
            raise ValueError(f"a short cached forward gave scores {gap:.2g} away from a full one (limit {limit:.2g})")
    window = scorer.windows.window
    if window is not None and window not in scorer.windows_seen:
        raise ValueError(f"its attention does not say which layers have the sliding window of {window} tokens")
    for prefix in prefixes:
        scorer.release(prefix)
    scorer.pool.forget_all()
