"""BLEU, chrF and COMET of completions against their ground truths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from openrlhf_ebft.evaluation.optional import require
from openrlhf_ebft.evaluation.statistics import LEVEL, bootstrap_mean


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, seed: int, resamples: int
) -> dict[str, Any]:
    """Corpus BLEU and chrF on sacrebleu's scale of 0 to 100, each with a bootstrap interval and sacrebleu's signature.

    Args:
        hypotheses: one text an example.
        references: its ground truth.
        seed: of the intervals.
        resamples: of the bootstrap over examples.
    Raises:
        ValueError: the lengths differ or there is no example.
        UserError: sacrebleu is not installed.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    sacrebleu = require("sacrebleu", "evaluation.tasks = [translation]")
    table: dict[str, Any] = {"examples": len(hypotheses)}
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        value = metric.corpus_score(list(hypotheses), [list(references)]).score
        low, high = _interval(metric, hypotheses, references, seed, resamples)
        table[name] = {"value": float(value), "low": low, "high": high, "count": len(hypotheses)}
        table[name]["signature"] = str(metric.get_signature())
    return table


def _interval(
    metric: Any, hypotheses: Sequence[str], references: Sequence[str], seed: int, resamples: int
) -> tuple[float | None, float | None]:
    """Percentile interval of a corpus score. sacrebleu's own bootstrap fails where a resample scores 0 in chrF."""
    if len(hypotheses) < 2:
        return None, None
    counts = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, len(counts), len(counts)) for _ in range(resamples))
    scores = [float(metric._aggregate_and_compute([counts[i] for i in draw]).score) for draw in draws]
    low, high = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def score_comet(triples: Sequence[tuple[str, str, str]], model: str, *, seed: int, resamples: int) -> dict[str, Any]:
    """Mean COMET score.

    Args:
        triples: (source, hypothesis, reference) of each example.
        model: checkpoint file (.ckpt), or a name that the comet package downloads.
        seed: of the interval.
        resamples: of the bootstrap.
    Raises:
        UserError: the comet package is not installed.
    """
    comet = require("comet", f"evaluation.comet_model = {model}")
    path = model if model.endswith(".ckpt") else comet.download_model(model)
    rows = [{"src": source, "mt": hypothesis, "ref": reference} for source, hypothesis, reference in triples]
    scores = comet.load_from_checkpoint(path).predict(rows, batch_size=8, gpus=0, progress_bar=False).scores
    return asdict(bootstrap_mean(scores, seed=seed, resamples=resamples)) | {"model": model}
