"""`openrlhf-ebft prepare-data SOURCE --out FILE`: training rows that every machine can make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command


def main(argv: Sequence[str]) -> int:
    """Writes the file and says how many rows it has; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft prepare-data",
        description="Write JSON lines, complete or not at all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        choices=("stdlib", "stdlib-modules"),
        metavar="SOURCE",
        help="stdlib: columns prompt, ground_truth and source, signature + docstring -> body of the functions of this "
        "Python's standard library; stdlib-modules: columns text and source, its whole modules",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write, such as datasets/pairs.jsonl")
    arguments = parser.parse_args(argv)
    out = Path(arguments.out)
    if arguments.source == "stdlib-modules":
        from openrlhf_ebft.data.stdlib_modules import write_stdlib_modules

        print(f"{write_stdlib_modules(out)} documents in {out}")
        return 0
    from openrlhf_ebft.data.stdlib_pairs import write_stdlib_pairs

    print(f"{write_stdlib_pairs(out)} pairs in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
