"""`openrlhf-ebft evaluate [MODEL] CONFIG`: measure a model on the held-out rows of a configuration."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.config_arguments import config_parser, split_overrides
from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import EBFTConfig, load_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.lora import LoRAConfig

_OWN_FLAGS = {"--model": True, "--out": True, "--help": False}


def main(argv: Sequence[str]) -> int:
    """Evaluates the configuration's model, or the one given before it or by --model; returns the exit code."""
    description = (
        "Measure cross-entropy, perplexity, alignment, diversity, feature matching and reward of a model on held-out "
        "rows, and what evaluation.tasks and evaluation.lm_eval_tasks name. Prints JSON with bootstrap intervals."
    )
    parser = config_parser("openrlhf-ebft evaluate", description, EBFTConfig)
    parser.usage = "openrlhf-ebft evaluate [MODEL] CONFIG [options] [--section.key value ...]"
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the same as MODEL: evaluate it (runs/NAME/model, or adapters); features come from the configuration's",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON to this file")
    own, overrides = split_overrides(argv, _OWN_FLAGS)
    positional, own = _take_model(own)
    arguments = parser.parse_args(own)
    if positional is not None and arguments.model is not None:
        raise UserError(f"two models: {positional} and --model {arguments.model}; name one")
    path = positional or arguments.model
    config = load_config(arguments.config, overrides)
    result_stream = sys.stdout
    # Standard output is for the result alone: progress, and what libraries say on being imported, goes to the other.
    with contextlib.redirect_stdout(sys.stderr):
        from openrlhf_ebft.trainer.evaluation_run import run_evaluation

        if path is None:
            return run_evaluation(config, arguments.out, result_stream)
        from openrlhf_ebft.trainer.export import whole_model

        with whole_model(path, say=print) as folder:
            return run_evaluation(_of_another_model(config, folder), arguments.out, result_stream)


def _of_another_model(config: EBFTConfig, path: str) -> EBFTConfig:
    """The configuration with another policy; its features still come from the configuration's model."""
    own = config.model
    features = config.features.model_copy(
        update={
            "path": config.features.path or own.path,
            "dtype": config.features.dtype or own.dtype,
            "source": "separate",
        }
    )
    model = own.model_copy(update={"path": path})
    return config.model_copy(update={"model": model, "features": features, "lora": LoRAConfig()})


def _take_model(own: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model, if two words stand alone, and the arguments without it."""
    alone = [
        i
        for i, word in enumerate(own)
        if not word.startswith("-") and not (i > 0 and _OWN_FLAGS.get(own[i - 1], False))
    ]
    if len(alone) != 2:
        return None, list(own)
    return own[alone[0]], [word for i, word in enumerate(own) if i != alone[0]]


if __name__ == "__main__":
    sys.exit(run_command(main))
