"""`openrlhf-ebft convert-reward SOURCE OUTPUT`: a reward model of the RAD authors' trainer as a classifier folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openrlhf_ebft.config.errors import UserError

DESCRIPTION = "Convert a GPT-2 reward model saved by the RAD authors' trainer into a Hugging Face classifier folder."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("source", help="folder with model.safetensors or pytorch_model.bin, or that file")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--tokenizer", help="folder or hub id of the GPT-2 tokenizer (default: the one in SOURCE)")
    parser.add_argument("--num-heads", type=int, help="attention heads (default: config.json's, else hidden size / 64)")


def main(argv: Sequence[str] | None = None) -> int:
    """Converts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="openrlhf-ebft convert-reward", description=DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    from openrlhf_ebft.rad.convert import convert_reward_model

    try:
        folder = convert_reward_model(
            arguments.source, arguments.output, tokenizer=arguments.tokenizer, num_heads=arguments.num_heads
        )
    except (ValueError, FileNotFoundError) as fault:
        raise UserError(str(fault)) from fault
    print(f"reward model: {folder} (use it with score_transform none)")
    return 0
