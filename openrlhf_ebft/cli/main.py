"""The console script `openrlhf-ebft`: finds the command's module and hands it the arguments."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from openrlhf_ebft import __version__
from openrlhf_ebft.cli.run_command import run_command

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("openrlhf_ebft.cli.train", "fine-tune a model as a configuration file says"),
    "doctor": ("openrlhf_ebft.cli.doctor", "check this machine or a cluster, and what of a run would not fit"),
    "evaluate": ("openrlhf_ebft.cli.evaluate", "measure a model on held-out rows"),
    "report": ("openrlhf_ebft.cli.report", "write curves, samples and configurations of runs as one HTML file"),
    "export": ("openrlhf_ebft.cli.export", "write a model folder from a run, a checkpoint or adapters"),
    "import-config": ("openrlhf_ebft.cli.import_config", "turn a configuration of another trainer into this one's"),
    "sweep": ("openrlhf_ebft.cli.sweep", "train with many configurations, here or as Ray jobs"),
    "generate": ("openrlhf_ebft.cli.generate", "print a model's completion of a prompt"),
    "prepare-model": ("openrlhf_ebft.cli.prepare_model", "fetch or convert a model into a Hugging Face folder"),
    "prepare-data": ("openrlhf_ebft.cli.prepare_data", "write a training file of pairs or documents"),
    "show-tree": ("openrlhf_ebft.cli.show_tree", "draw a small rollout tree of a configuration's data and model"),
    "train-reward": ("openrlhf_ebft.cli.train_reward", "train a prefix reward model for decoding"),
    "serve-rad": ("openrlhf_ebft.cli.serve_rad", "serve a model with reward-augmented decoding over HTTP"),
    "convert-reward": ("openrlhf_ebft.cli.convert_reward", "convert a reward model's checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 wrong input, 1 other failures, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    command = arguments[0]
    if command in ("-V", "--version"):
        print(f"openrlhf-ebft {__version__}")
        return 0
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"commands: {', '.join(COMMANDS)}"
        print(f"openrlhf-ebft: unknown command {command!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[command][0])
    return run_command(module.main, arguments[1:])


def _usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {help_text}" for name, (_, help_text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: openrlhf-ebft COMMAND [ARGUMENTS]",
            "",
            "Energy-based fine-tuning and reward-augmented decoding.",
            "",
            "commands:",
            *lines,
            "",
            "openrlhf-ebft COMMAND --help tells more; openrlhf-ebft --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
