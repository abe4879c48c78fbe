"""`openrlhf-ebft report RUN [RUN ...]`: curves, samples and configurations of runs as one HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command


def main(argv: Sequence[str]) -> int:
    """Writes the report and prints its place; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft report",
        description="Write one HTML file, which needs no network, about one run or several runs overlaid.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run directory, such as runs/NAME")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="default: report.html in RUN, or for several in the current folder"
    )
    arguments = parser.parse_args(argv)
    from openrlhf_ebft.trainer.report import write_report

    single = len(arguments.runs) == 1
    out = arguments.out or (arguments.runs[0] / "report.html" if single else Path("report.html"))
    write_report(arguments.runs, out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
