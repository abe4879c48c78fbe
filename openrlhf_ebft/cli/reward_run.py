"""The run behind `train-reward`: progress bar, training on one or several ranks, held-out report."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from openrlhf_ebft.config import dump_config
from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.reward_training import RewardConfig
from openrlhf_ebft.rad.loading import load_sequence_classifier
from openrlhf_ebft.rad.reward_checkpoint import RewardCheckpoints
from openrlhf_ebft.rad.reward_examples import RewardExamples
from openrlhf_ebft.rad.reward_report import markdown_table, plot_errors, prefix_errors
from openrlhf_ebft.rad.reward_training import (
    PrefixRewardTrainSpec,
    RewardStep,
    default_device,
    train_prefix_reward_model,
)

Rows = tuple[list[str], list[float]]
BAR_WIDTH = 30


def run_reward_training(config: RewardConfig, train: Rows, held_out: Rows) -> int:
    """Train, save, then write held_out.md, held_out.json and held_out.png beside the model; the exit code."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward_config.yaml").write_text(dump_config(config), encoding="utf-8")
    fields = PrefixRewardTrainSpec.__dataclass_fields__
    spec = PrefixRewardTrainSpec(**{name: getattr(config.training, name) for name in fields})
    print(f"training on {len(train[0])} texts, {len(held_out[0])} held out", file=sys.stderr)
    checkpoints = RewardCheckpoints(
        folder.absolute() / "checkpoints", config.training.checkpoint_every, config.training.resume
    )
    if config.training.ranks > 1:
        from openrlhf_ebft.actors.reward_training import train_on_ranks
        from openrlhf_ebft.actors.waiting import ActorError

        try:
            train_on_ranks(config, spec, train, progress_bar(), checkpoints)
        except ActorError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    else:
        try:
            train_prefix_reward_model(
                config.backbone, *train, folder, spec=spec, checkpoints=checkpoints, on_step=progress_bar()
            )
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from error
    if held_out[0]:
        report(folder, held_out, spec.max_length)
    print(f"reward model: {folder}")
    return 0


def report(folder: Path, held_out: Rows, max_length: int) -> None:
    """Held-out errors per prefix length of the saved model: printed and written."""
    model, tokenizer = load_sequence_classifier(folder, device=default_device())
    errors = prefix_errors(model, RewardExamples(tokenizer, *held_out, max_length))
    table = markdown_table(errors)
    print(table)
    (folder / "held_out.md").write_text(table, encoding="utf-8")
    rows = [asdict(error) for error in errors]
    (folder / "held_out.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print("no held_out.png: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
    else:
        plot_errors(errors, folder / "held_out.png")


def progress_bar() -> Callable[[RewardStep], None]:
    """A hook that draws one line: bar, step, loss, time left. Off a terminal it writes about twenty plain lines."""
    start = time.monotonic()
    shown = 0
    live = sys.stderr.isatty()

    def show(step: RewardStep) -> None:
        nonlocal shown
        shown += 1
        left = (time.monotonic() - start) / shown * (step.total_steps - step.step)
        filled = BAR_WIDTH * step.step // step.total_steps
        line = (
            f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {step.step}/{step.total_steps} "
            f"loss {step.loss:.4f} lr {step.learning_rate:.2e} {left:.0f} s left"
        )
        last = step.step == step.total_steps
        if live:
            print(f"\r{line}  ", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last or step.step % max(step.total_steps // 20, 1) == 0:
            print(line, file=sys.stderr, flush=True)

    return show
