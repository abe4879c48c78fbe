"""`openrlhf-ebft evaluate CONFIG`: measure a model on the held-out rows of a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, load_config


def main(argv: Sequence[str]) -> int:
    """Evaluates the configuration's model, or the one given by --model; returns the exit code."""
    description = (
        "Measure cross-entropy, alignment, diversity, feature matching and reward of a model on the held-out rows."
    )
    parser = config_parser("openrlhf-ebft evaluate", description, EBFTConfig)
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="evaluate this model, such as runs/NAME/model; features still come from the configuration's",
    )
    own, overrides = split_overrides(argv, {"--model": True, "--help": False})
    arguments = parser.parse_args(own)
    config = load_config(arguments.config, overrides)
    if arguments.model is not None:
        # The features' default is the initial policy: keep it when another policy is measured.
        features = config.features.model_copy(update={"path": config.features.path or config.model.path})
        model = config.model.model_copy(update={"path": arguments.model})
        config = config.model_copy(update={"model": model, "features": features})
    from openrlhf_ebft.trainer.run import run_evaluation

    return run_evaluation(config)


if __name__ == "__main__":
    sys.exit(run_command(main))
