"""BLEU, chrF and COMET of completions against their ground truths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from openrlhf_ebft.evaluation.optional import require
from openrlhf_ebft.evaluation.statistics import bootstrap_mean


def score_translations(hypotheses: Sequence[str], references: Sequence[str], *, resamples: int) -> dict[str, Any]:
    """Corpus BLEU and chrF on sacrebleu's scale of 0 to 100, each with sacrebleu's bootstrap interval and signature.

    Args:
        hypotheses: one text an example.
        references: its ground truth.
        resamples: of the bootstrap, whose seed is sacrebleu's (variable SACREBLEU_SEED, default 12345).
    Raises:
        ValueError: the lengths differ or there is no example.
        UserError: sacrebleu is not installed.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    sacrebleu = require("sacrebleu", "evaluation.tasks = [translation]")
    table: dict[str, Any] = {"examples": len(hypotheses)}
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        value = metric.corpus_score(list(hypotheses), [list(references)])
        table[name] = {"value": value.score, "low": None, "high": None, "count": len(hypotheses)}
        if len(hypotheses) > 1:
            spread = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=resamples)
            table[name] |= {"low": float(spread._mean - spread._ci), "high": float(spread._mean + spread._ci)}
        table[name]["signature"] = str(metric.get_signature())
    return table


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
