"""`openrlhf-ebft sweep CONFIG ...`: many configurations, one after the other or side by side, resumable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs what is not finished; returns 0 when all runs are, 1 after a failure, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft sweep",
        description="Train with every configuration. Finished runs are left alone and others go on from their newest "
        "checkpoint, so the same command is given again after an interrupt.",
        allow_abbrev=False,
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", type=Path, help="YAML file, or folder of such files")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--ray-jobs", metavar="URL", help="submit Ray jobs to this dashboard, such as http://HEAD:8265")
    parser.add_argument("--working-dir", metavar="DIR", help="with --ray-jobs: folder that is sent along with each job")
    parser.add_argument("--logs", metavar="DIR", type=Path, default=Path("sweep-logs"), help="output of local runs")
    parser.add_argument("--dry-run", action="store_true", help="check every configuration, list them and stop")
    arguments = parser.parse_args(argv)
    if arguments.parallel < 1:
        raise UserError(f"--parallel {arguments.parallel}: must be 1 or more")
    if arguments.working_dir and not arguments.ray_jobs:
        raise UserError("--working-dir is sent to a cluster: name it with --ray-jobs")
    from openrlhf_ebft.trainer.sweep import LocalRuns, RayJobs, collect_runs, run_sweep

    runs = collect_runs(arguments.configs)
    if arguments.dry_run:
        for run in runs:
            print(f"{run.config.name}  {'finished' if run.is_finished else 'to do'}  {run.path}")
        return 0
    launcher = RayJobs(arguments.ray_jobs, arguments.working_dir) if arguments.ray_jobs else LocalRuns(arguments.logs)
    outcomes = run_sweep(runs, launcher, arguments.parallel, lambda text: print(text, flush=True))
    for name, outcome in outcomes.items():
        print(f"{outcome:>15}  {name}")
    if "interrupted" in outcomes.values():
        return 130
    return 1 if "failed" in outcomes.values() else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
