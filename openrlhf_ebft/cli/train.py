"""`openrlhf-ebft train CONFIG`: check a configuration, then run the training it describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, dump_config, load_config
from openrlhf_ebft.config.rules import list_notes


def main(argv: Sequence[str]) -> int:
    """Trains, or with --print-config shows what would run; returns the exit code."""
    parser = config_parser("openrlhf-ebft train", "Fine-tune a model by energy-based fine-tuning.", EBFTConfig)
    parser.add_argument("--print-config", action="store_true", help="print the checked configuration and stop")
    own, overrides = split_overrides(argv, {"--print-config": False, "--help": False})
    arguments = parser.parse_args(own)
    config = load_config(arguments.config, overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    for note in list_notes(config):
        print(f"note: {note}", file=sys.stderr)
    from openrlhf_ebft.trainer.run import run_training

    return run_training(config)


if __name__ == "__main__":
    sys.exit(run_command(main))
