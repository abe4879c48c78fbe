"""`openrlhf-ebft train CONFIG`: check a configuration, then run the training it describes; or resume a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, dump_config, load_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.rules import list_notes


def main(argv: Sequence[str]) -> int:
    """Trains, or with --print-config shows what would run; returns the exit code."""
    description = "Fine-tune a model by energy-based fine-tuning."
    parser = config_parser("openrlhf-ebft train", description, EBFTConfig, config_required=False)
    parser.add_argument("--print-config", action="store_true", help="print the checked configuration and stop")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this run directory (such as runs/NAME), without CONFIG"
    )
    own, overrides = split_overrides(argv, {"--print-config": False, "--help": False, "--resume": True})
    arguments = parser.parse_args(own)
    if arguments.resume is not None:
        return _resume(arguments.resume, [*([arguments.config] if arguments.config else []), *overrides])
    if arguments.config is None:
        parser.error("CONFIG is missing: name a YAML file, or --resume RUN")
    config = load_config(arguments.config, overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    for note in list_notes(config):
        print(f"note: {note}", file=sys.stderr)
    from openrlhf_ebft.trainer.run import run_training

    return run_training(config)


def _resume(run: str, others: Sequence[str]) -> int:
    """A resumed run must be the run that was started: its configuration comes from its own folder."""
    if others:
        raise UserError(f"--resume {run} takes its configuration from {run}/config.yaml: leave out {' '.join(others)}")
    if not (Path(run) / "config.yaml").is_file():
        raise UserError(f"--resume {run}: no run directory (it has no config.yaml)")
    from openrlhf_ebft.trainer.run import resume_training

    return resume_training(Path(run))


if __name__ == "__main__":
    sys.exit(run_command(main))
