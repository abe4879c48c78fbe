"""`openrlhf-ebft export RUN_OR_CHECKPOINT --out DIR`: a model folder from a run, a checkpoint or adapters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import UserError


def main(argv: Sequence[str]) -> int:
    """Writes the folder and prints its place; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.dtype is not None and not arguments.merge:
        raise UserError(f"--dtype {arguments.dtype} is for merged weights: add --merge, or leave it out")
    from openrlhf_ebft.trainer.export import export_model

    options = {"merge": arguments.merge, "dtype": arguments.dtype, "averaged": arguments.ema}
    export_model(arguments.source, arguments.out, say=print, **options)
    print(arguments.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft export",
        description="Write a model folder: complete, or not at all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        type=Path,
        help="run directory (its final model, else its newest checkpoint), a checkpoint such as "
        "runs/NAME/checkpoints/step-20, or a folder with adapters",
    )
    parser.add_argument("--out", required=True, metavar="DIR", type=Path, help="folder to write")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add LoRA adapters to the base model's weights, which gives a plain Hugging Face model; without it, "
        "adapters stay adapters",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the moving average of the weights (policy.ema_decay) instead of the last ones",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="precision of merged weights (default: that of the base model's files)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
