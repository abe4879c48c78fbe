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
        "--resume",
        metavar="RUN",
        help="go on with the run in this run directory (such as runs/NAME; CONFIG may be left out); auto: with that of "
        "CONFIG, or start it when there is no checkpoint",
    )
    parser.add_argument(
        "--allow-config-change", action="store_true", help="with --resume: take the configuration although it differs"
    )
    flags = {"--print-config": False, "--help": False, "--resume": True, "--allow-config-change": False}
    own, overrides = split_overrides(argv, flags)
    arguments = parser.parse_args(own)
    if arguments.config is None and arguments.resume in (None, "auto"):
        parser.error("CONFIG is missing: name a YAML file, or --resume RUN")
    if arguments.config is None:
        config = _config_of_run(arguments.resume, overrides, changes_allowed=arguments.allow_config_change)
    else:
        config = load_config(arguments.config, overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    for note in list_notes(config):
        print(f"note: {note}", file=sys.stderr)
    from openrlhf_ebft.trainer.run import resume_training, run_training, start_or_resume

    if arguments.resume is None:
        return run_training(config)
    if arguments.resume == "auto":
        return start_or_resume(config, allow_change=arguments.allow_config_change)
    _require_run(arguments.resume)
    return resume_training(Path(arguments.resume), config, allow_change=arguments.allow_config_change)


def _config_of_run(run: str, overrides: Sequence[str], *, changes_allowed: bool) -> EBFTConfig:
    """The configuration in a run directory; a run that goes on must be the run that was started."""
    if overrides and not changes_allowed:
        raise UserError(
            f"--resume {run} takes its configuration from {run}/config.yaml: leave out {' '.join(overrides)}, or add "
            "--allow-config-change"
        )
    _require_run(run)
    return load_config(Path(run) / "config.yaml", overrides)


def _require_run(run: str) -> None:
    if not (Path(run) / "config.yaml").is_file():
        raise UserError(f"--resume {run}: no run directory (it has no config.yaml)")


if __name__ == "__main__":
    sys.exit(run_command(main))
