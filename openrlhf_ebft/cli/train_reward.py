"""`openrlhf-ebft train-reward CONFIG`: train a prefix reward model and report its held-out errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.config import dump_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.reward_training import RewardConfig, RewardDataConfig, load_reward_config

DESCRIPTION = "Train a prefix reward model for reward-augmented decoding."
Rows = tuple[list[str], list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments besides CONFIG and the configuration flags."""
    parser.add_argument("--print-config", action="store_true", help="print the checked configuration and stop")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the configuration says; returns the exit code."""
    parser = config_parser("openrlhf-ebft train-reward", DESCRIPTION, RewardConfig)
    add_arguments(parser)
    words = sys.argv[1:] if argv is None else argv
    own, overrides = split_overrides(words, {"--print-config": False, "--help": False})
    arguments = parser.parse_args(own)
    config = load_reward_config(arguments.config, overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    train, held_out = read_examples(config.data)
    from openrlhf_ebft.cli.reward_run import run_reward_training

    return run_reward_training(config, train, held_out)


def read_examples(data: RewardDataConfig) -> tuple[Rows, Rows]:
    """Training and held-out rows with labels scaled to [0, 1]; without a held-out file, every n-th row is held out."""
    texts, labels = read_rows(data.train_path, data)
    if data.held_out_path is not None:
        return (texts, labels), read_rows(data.held_out_path, data)
    if data.held_out_fraction == 0:
        return (texts, labels), ([], [])
    count = round(len(texts) * data.held_out_fraction)
    held = {round(index * len(texts) / count) for index in range(count)} if count else set()
    split = [[index for index in range(len(texts)) if (index in held) is wanted] for wanted in (False, True)]
    if not split[0]:
        raise UserError(f"{data.train_path}: {len(texts)} rows leave none to train on; lower data.held_out_fraction")
    train, rest = (([texts[i] for i in part], [labels[i] for i in part]) for part in split)
    return train, rest


def read_rows(path: str, data: RewardDataConfig) -> Rows:
    """Texts and scaled labels of a JSON Lines file.

    Raises:
        UserError: names file, line and column of the first faulty row.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}") from None
    texts, labels = [], []
    # Split at line feeds only: a text may hold other line separators.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        text, label = _read_row(f"{path}, line {number}", line, data)
        texts.append(text)
        labels.append(label)
    if not texts:
        raise UserError(f"{path}: holds no rows")
    return texts, labels


def _read_row(where: str, line: str, data: RewardDataConfig) -> tuple[str, float]:
    try:
        row = json.loads(line)
    except ValueError as fault:  # of JSON's grammar, or a number of thousands of digits
        raise UserError(f"{where}: not JSON: {getattr(fault, 'msg', fault)}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object with {data.text_column!r} and {data.label_column!r}")
    for column in (data.text_column, data.label_column):
        if column not in row:
            raise UserError(f"{where}: has no column {column!r}; it has {', '.join(sorted(row)) or 'none'}")
    text, label = row[data.text_column], row[data.label_column]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {data.text_column!r} must be a text that is not empty, got {text!r}")
    if isinstance(label, bool) or not isinstance(label, (int, float)) or not data.label_min <= label <= data.label_max:
        raise UserError(
            f"{where}: {data.label_column!r} must be a number from {data.label_min} to {data.label_max}, got {label!r}"
        )
    return text, (label - data.label_min) / (data.label_max - data.label_min)
