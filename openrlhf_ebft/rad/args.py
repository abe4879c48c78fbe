"""Checked arguments of the RAD control."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from openrlhf_ebft.rad.values import MOST_STRENGTH, check_score_transform


@dataclass
class RADArgs:
    """Arguments of :class:`openrlhf_ebft.rad.RAD`; every fault is a ValueError that names the argument.

    Attributes:
        beta: steering strength (logit units per unit of reward), 0 to 1e30; `invert` gives the direction.
        reward_model_id: hub id or folder of a sequence classifier; kept as text.
        reward_model_kwargs: extra arguments of its `from_pretrained` (dtype, revision, ...).
        top_k: candidates scored per step, >= 1; more than the vocabulary means the whole vocabulary.
        score_index: column of the classifier's output that is the reward, >= 0.
        score_transform: `none`, `sigmoid` or `softmax` over the output before the column is taken.
        invert: use 1 - reward (after the clamp to [0, 1]).
        efficient: keep the reward model's keys and values across steps where that is possible.
        include_in_scoring: apply the shift in `compute_logprobs` too.
        verify: check every cached score against a full forward pass (slow; for debugging).
        best_only: generation is greedy, so candidates that cannot win need no score; see :class:`ValueGuidedProcessor`.
    """

    beta: float
    reward_model_id: str
    reward_model_kwargs: dict[str, Any] = field(default_factory=dict)
    top_k: int = 20
    score_index: int = 0
    score_transform: str = "none"
    invert: bool = False
    efficient: bool = True
    include_in_scoring: bool = True
    verify: bool = False
    best_only: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)):
            raise ValueError(f"beta must be a number >= 0, got {self.beta!r}")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta must be finite and >= 0, got {self.beta}; use invert=True to steer the other way")
        if self.beta > MOST_STRENGTH:
            raise ValueError(f"beta must be at most {MOST_STRENGTH:g}: larger shifts are inf or NaN in float32")
        if isinstance(self.reward_model_id, os.PathLike):
            self.reward_model_id = os.fspath(self.reward_model_id)
        if not isinstance(self.reward_model_id, str) or not self.reward_model_id:
            raise ValueError(f"reward_model_id must be a hub id or a folder, got {self.reward_model_id!r}")
        if not isinstance(self.reward_model_kwargs, dict):
            raise ValueError(f"reward_model_kwargs must be a dict, got {type(self.reward_model_kwargs).__name__}")
        _check_int("top_k", self.top_k, 1)
        _check_int("score_index", self.score_index, 0)
        check_score_transform(self.score_transform)
        for name in ("invert", "efficient", "include_in_scoring", "verify", "best_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
