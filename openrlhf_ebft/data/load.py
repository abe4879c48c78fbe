"""All of it together: from the configuration to the references of training and of evaluation."""

from __future__ import annotations

import logging
from collections import Counter

from transformers import PreTrainedTokenizerBase

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.examples import Example, RowFault, make_examples
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.sources import read_rows
from openrlhf_ebft.data.splitting import content_hash, is_heldout
from openrlhf_ebft.data.structured import PromptTokenizer, fit_lengths, make_reference

logger = logging.getLogger(__name__)


def load_data(
    config: EBFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Reference], list[Reference], DataReport]:
    """Reads, checks, splits and tokenises `config.data`; returns (training, held-out, what became of the rows).

    Example ids depend on the content alone; a repeated row gets a running number. The report is logged, too.

    Raises:
        DataError: nothing to read, no usable rows, or, in strict mode, the first faulty row with file and row.
    """
    report = DataReport(strict=config.data.on_bad_row == "strict")
    encoder = PromptTokenizer(tokenizer, config.data.append_eos)
    train: list[Reference] = []
    heldout: list[Reference] = []
    seen: Counter[int] = Counter()
    rows = read_rows(config.data.path, config.data.split, report)
    for example in make_examples(rows, config.data, tokenizer, report):
        ids = _encode(example, encoder, config, report)
        if ids is None:
            continue
        row_hash = content_hash(example.prompt, example.ground_truth)
        seen[row_hash] += 1
        suffix = f"-{seen[row_hash]}" if seen[row_hash] > 1 else ""
        reference = make_reference(f"{row_hash:016x}{suffix}", *ids, config.rollout)
        side = heldout if is_heldout(row_hash, config.data.heldout_fraction) else train
        side.append(reference)
    report.train_rows, report.heldout_rows = len(train), len(heldout)
    _finish(report, seen, config)
    return train, heldout, report


def _encode(
    example: Example, encoder: PromptTokenizer, config: EBFTConfig, report: DataReport
) -> tuple[list[int], list[int]] | None:
    """Returns (prompt ids, ground-truth ids), or None for a row that is left out and counted."""
    data = config.data
    try:
        prompt, ground_truth = encoder.prompt_ids(example), encoder.ground_truth_ids(example)
    except RowFault as fault:
        report.fault(example.place, fault.reason, str(fault))
        return None
    if len(prompt) > data.max_prompt_tokens and data.over_long_prompt == "truncate_left":
        detail = f"prompt of {len(prompt)} tokens cut to the last {data.max_prompt_tokens}"
        report.change(example.place, "prompt truncated", detail)
        prompt = encoder.truncate_left(prompt, data.max_prompt_tokens)
    misfit = fit_lengths(prompt, ground_truth, data)
    if misfit is None:
        return prompt, ground_truth
    if misfit.reason == "over-long prompt" and data.over_long_prompt == "error":
        raise DataError(f"{example.place}: {misfit} (data.over_long_prompt = skip or truncate_left goes on)")
    report.skip(example.place, misfit.reason, str(misfit))
    return None


def _finish(report: DataReport, seen: Counter[int], config: EBFTConfig) -> None:
    repeated = seen.total() - len(seen)
    if repeated:
        report.notes.append(f"{repeated} rows repeat an earlier one and are used as often as they stand there")
    if report.train_rows and not report.heldout_rows and config.data.heldout_fraction > 0:
        fraction = config.data.heldout_fraction
        report.notes.append(f"no row is held out: data.heldout_fraction = {fraction} of so few rows; evaluation is off")
    logger.info("%s", report.summary())
    if report.train_rows:
        return
    if report.rows_read == 0:
        raise DataError(f"data.path = {config.data.path}: holds no rows")
    where = f"all {report.heldout_rows} usable rows are held out" if report.heldout_rows else "no row can be used"
    raise DataError(f"data.path = {config.data.path}: {where}\n{report.summary()}")
