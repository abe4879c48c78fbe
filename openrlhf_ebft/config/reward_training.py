"""Configuration of `openrlhf-ebft train-reward`: every knob with its unit, default and range, written once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from openrlhf_ebft.config.load import load_typed
from openrlhf_ebft.config.section import Section


class RewardDataConfig(Section):
    """Texts and their labels."""

    train_path: str = Field(description="JSON Lines file of training rows")
    held_out_path: str | None = Field(None, description="JSON Lines file of held-out rows; null: a share of the others")
    held_out_fraction: float = Field(
        0.1, ge=0.0, lt=1.0, description="share of train_path held out when held_out_path is null; 0 measures nothing"
    )
    text_column: str = Field("text", description="column with the text")
    label_column: str = Field("label", description="column with the label")
    label_min: float = Field(0.0, description="label that becomes 0; labels are scaled linearly to [0, 1]")
    label_max: float = Field(1.0, description="label that becomes 1")


class RewardTrainingConfig(Section):
    """How the reward model is trained."""

    max_length: int = Field(64, ge=1, description="tokens kept of a text")
    batch_size: int = Field(64, ge=1, description="texts per optimizer step, over all ranks")
    epochs: int = Field(1, ge=1, description="passes over the texts")
    learning_rate: float = Field(1e-5, gt=0.0, description="peak learning rate, decayed linearly to 0")
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW's weight decay")
    seed: int = Field(0, ge=0, description="seed of the head and of the order of the texts")
    log_every: int = Field(50, ge=1, description="optimizer steps between two log lines")
    checkpoint_every: int = Field(0, ge=0, description="optimizer steps between two checkpoints; 0 saves none")
    resume: bool = Field(True, description="go on from the newest checkpoint of output_dir, if there is one")
    ranks: int = Field(1, ge=1, description="processes; above 1 they are Ray actors that train with DeepSpeed")
    zero_stage: int = Field(2, ge=0, le=2, description="DeepSpeed's ZeRO stage when there is more than one rank")
    timeout_s: float = Field(1800.0, gt=0.0, description="limit of loading, saving or one step on ranks, in seconds")


class RewardConfig(Section):
    """One reward-model training run."""

    backbone: str = Field(description="folder or hub name of the causal language model to start from")
    output_dir: str = Field(description="folder for the reward model, its report and its checkpoints")
    data: RewardDataConfig
    training: RewardTrainingConfig = Field(default_factory=RewardTrainingConfig)


def load_reward_config(path: str | Path, overrides: Sequence[str] = ()) -> RewardConfig:
    """Reads a file, applies `--section.key value` flags and checks the result.

    Raises:
        ConfigError: names every fault found, with the file's line or the flag and what is allowed.
    """
    return load_typed(RewardConfig, path, overrides, check_reward_rules)


def check_reward_rules(config: RewardConfig) -> list[str]:
    """One sentence for each broken rule between keys."""
    problems = []
    if config.data.label_max <= config.data.label_min:
        problems.append(
            f"data.label_max = {config.data.label_max} must be above data.label_min = {config.data.label_min}"
        )
    if config.training.batch_size < config.training.ranks:
        problems.append(
            f"training.batch_size = {config.training.batch_size} must be at least training.ranks = "
            f"{config.training.ranks}, one text per rank"
        )
    return problems
