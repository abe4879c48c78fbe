"""Training a prefix reward model: a one-output head on a causal language model, right on every prefix of a text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from openrlhf_ebft.rad.loading import load_tokenizer, sequence_classifier_class
from openrlhf_ebft.rad.prefixes import reward_model_limit
from openrlhf_ebft.rad.reward_checkpoint import (
    CheckpointMismatch,
    RewardCheckpoints,
    read_process_state,
    write_process_state,
)
from openrlhf_ebft.rad.reward_examples import RewardExamples, batch_indices, check_examples
from openrlhf_ebft.rad.reward_loss import prefix_reward_loss, prefix_rewards

logger = logging.getLogger(__name__)

# A fresh head at its usual scale saturates the sigmoid over the backbone's hidden states; this keeps it near 0.5.
HEAD_SCALE = 0.01


@dataclass(frozen=True)
class PrefixRewardTrainSpec:
    """Settings of :func:`train_prefix_reward_model`.

    Attributes:
        max_length: tokens kept of a text.
        batch_size: texts per optimizer step.
        epochs: passes over the texts.
        learning_rate: peak of AdamW's, decayed linearly to 0 over all steps.
        weight_decay: AdamW's.
        seed: of the head and of the order of the texts.
        log_every: optimizer steps between two log lines.
    """

    max_length: int = 64
    batch_size: int = 64
    epochs: int = 1
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    seed: int = 0
    log_every: int = 50

    def __post_init__(self) -> None:
        for name, least in (("max_length", 1), ("batch_size", 1), ("epochs", 1), ("log_every", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
        if not (isinstance(self.learning_rate, Real) and 0 < self.learning_rate < math.inf):
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        if not (isinstance(self.weight_decay, Real) and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}")


@dataclass(frozen=True)
class RewardStep:
    """What a step reports: its number from 1, the number of all steps, the batch's loss, the learning rate used."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float


OnStep = Callable[[RewardStep], None]


def build_reward_model(backbone: str, seed: int) -> tuple[PreTrainedModel, Any]:
    """A classifier with one fresh, small output on the backbone (float32), and its tokenizer (right padding).

    Raises:
        OSError: no such model, or no tokenizer.
        ValueError: the classifier is not decoder-only.
    """
    torch.manual_seed(seed)
    kwargs: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32}
    classifier = sequence_classifier_class(backbone, **kwargs)
    tokenizer = load_tokenizer(backbone)
    model = classifier.from_pretrained(backbone, **kwargs)
    head = getattr(model, "score", None)
    if head is None:
        raise ValueError(f"{backbone} is not decoder-only: {type(model).__name__} has no score head at every position")
    head.reset_parameters()
    with torch.no_grad():
        head.weight.mul_(HEAD_SCALE)
    if tokenizer.pad_token_id is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


class RewardTrainer:
    """One process that trains a reward model, step by step. The distributed trainer replaces `_apply` only.

    Args:
        model: from :func:`build_reward_model`, already on its device.
        examples: the training examples.
        spec: settings.
        rank, world_size: this process's share of every batch: its examples rank, rank + world_size, ...

    Raises:
        ValueError: a text is longer than the model reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        examples: RewardExamples,
        spec: PrefixRewardTrainSpec,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_lengths(model, examples)
        self.model = model.train()
        self.examples = examples
        self.spec = spec
        self.rank, self.world_size = rank, world_size
        self.total_steps = math.ceil(len(examples) / spec.batch_size) * spec.epochs
        self.step = 0
        self.device = next(model.parameters()).device
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        spec = self.spec
        self.optimizer = AdamW(self.model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)
        self.scheduler = LambdaLR(self.optimizer, self.schedule_factor)

    @property
    def warning(self) -> str | None:
        """What the user should know of the examples before training starts; None: nothing."""
        if not self.examples.num_cut:
            return None
        size = len(self.examples)
        return f"{self.examples.num_cut} of {size} texts are cut to max_length = {self.spec.max_length} tokens"

    def schedule_factor(self, step: int) -> float:
        """Linear decay: step 0 has the peak, step `total_steps` would have 0."""
        return max(1 - step / self.total_steps, 0.0)

    def train_step(self) -> RewardStep:
        """One optimizer step on the next batch.

        Raises:
            ValueError: a loss that is not finite; no weight is changed.
        """
        loss = self._loss()
        value = self._mean_over_ranks(loss)
        if not math.isfinite(value):
            raise ValueError(f"the loss of step {self.step + 1} is {value}; lower learning_rate or check the backbone")
        rate = self.spec.learning_rate * self.schedule_factor(self.step)
        self._apply(loss)
        self.step += 1
        return RewardStep(self.step, self.total_steps, value, rate)

    def _loss(self) -> torch.Tensor:
        """This rank's part of the batch loss; its mean over the ranks is the loss of the whole batch."""
        spec = self.spec
        whole = batch_indices(len(self.examples), spec.batch_size, spec.seed, self.step)
        # A rank without an example of a short batch still runs one, with weight 0: all ranks make the same calls.
        mine = whole[self.rank :: self.world_size]
        batch = self.examples.collate(mine or whole[:1], self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type != "cpu"):
            predictions = self._predict(batch.input_ids, batch.attention_mask)
        loss = prefix_reward_loss(predictions, batch.labels, batch.attention_mask)
        return loss * (len(mine) * self.world_size / len(whole))

    def _predict(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return prefix_rewards(self.model, input_ids, attention_mask)

    def _mean_over_ranks(self, loss: torch.Tensor) -> float:
        return float(loss.detach())

    def _apply(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def progress(self) -> dict[str, Any]:
        """Where the run stands: step, random state, settings and digest of the data."""
        return {
            "step": self.step,
            "rng": torch.get_rng_state(),
            "spec": asdict(self.spec),
            "data": self.examples.fingerprint(),
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        """Go on where `state` stands.

        Raises:
            CheckpointMismatch: the state comes from other settings or other data; the message names what differs.
        """
        check_same_run(state, self.spec, self.examples)
        self.step = state["step"]
        torch.set_rng_state(state["rng"])

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights: progress, optimizer and schedule."""
        return self.progress() | {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`; raises what `load_progress` does."""
        self.load_progress(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def _check_lengths(model: PreTrainedModel, examples: RewardExamples) -> None:
    limit, longest = reward_model_limit(model), max(map(len, examples.token_ids))
    if limit is not None and longest > limit:
        raise ValueError(
            f"a text has {longest} tokens, but the backbone reads {limit}: set max_length to {limit} or less"
        )


def check_same_run(state: dict[str, Any], spec: PrefixRewardTrainSpec, examples: RewardExamples) -> None:
    """Raise CheckpointMismatch if a checkpoint's settings or data are not those of this run."""
    now = asdict(spec)
    changed = [name for name, value in state["spec"].items() if name != "log_every" and now[name] != value]
    if changed:
        pairs = ", ".join(f"{name} {state['spec'][name]} -> {now[name]}" for name in changed)
        raise CheckpointMismatch(f"the checkpoint was trained with other settings: {pairs}; start anew or restore them")
    if state["data"] != examples.fingerprint():
        raise CheckpointMismatch(
            "the checkpoint was trained on other examples than those given; start anew or restore them"
        )


def run_training(trainer: RewardTrainer, checkpoints: RewardCheckpoints | None, on_step: OnStep | None) -> None:
    """All remaining steps, with log lines, checkpoints and the caller's hook."""
    while trainer.step < trainer.total_steps:
        report = trainer.train_step()
        if report.step % trainer.spec.log_every == 0 or report.step == report.total_steps:
            logger.info(
                "step %d/%d loss %.5f lr %.3g", report.step, report.total_steps, report.loss, report.learning_rate
            )
        if on_step is not None:
            on_step(report)
        if checkpoints is not None and checkpoints.is_due(report.step, report.total_steps):
            checkpoints.write(report.step, lambda folder: write_process_state(folder, trainer.model, trainer.state()))


def train_prefix_reward_model(
    backbone: str | Path,
    texts: Sequence[str],
    labels: Sequence[float],
    output_dir: str | Path,
    *,
    spec: PrefixRewardTrainSpec | None = None,
    device: str | torch.device | None = None,
    checkpoints: RewardCheckpoints | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Fine-tune a causal language model into a prefix reward model and save it with its tokenizer.

    Fresh head scaled by 0.01, right padding, AdamW with linear decay, bf16 autocast on an accelerator, float32 on the
    CPU. `load_sequence_classifier(output_dir)` reads it, and RAD with `score_transform="sigmoid"` steers by it.

    Args:
        backbone: hub id or folder of the causal language model.
        texts: one or more, none empty; cut to `spec.max_length` tokens.
        labels: one per text, in [0, 1].
        output_dir: folder to write.
        spec: settings; default `PrefixRewardTrainSpec()`.
        device: default: the accelerator if there is one, else the CPU.
        checkpoints: where and how often to save, and where to resume from; None saves the result only.
        on_step: called after every optimizer step.

    Returns:
        `output_dir`.

    Raises:
        OSError: no such backbone, or a folder that cannot be written.
        ValueError: labels outside [0, 1], empty texts, different numbers of both, a loss that is not finite, a
            backbone that is not decoder-only, a checkpoint of another run.
    """
    spec = spec or PrefixRewardTrainSpec()
    check_examples(texts, labels)  # before the backbone is loaded, which takes long
    model, tokenizer = build_reward_model(str(backbone), spec.seed)
    examples = RewardExamples(tokenizer, texts, labels, spec.max_length)
    newest = checkpoints.newest() if checkpoints is not None else None
    state = None if newest is None else read_process_state(newest, model)
    trainer = RewardTrainer(model.to(device or default_device()), examples, spec)
    if trainer.warning:
        logger.warning(trainer.warning)
    if state is not None:
        trainer.load_state(state)
        logger.info("resumed at step %d of %d", trainer.step, trainer.total_steps)
    run_training(trainer, checkpoints, on_step)
    return save_reward_model(trainer.model, tokenizer, output_dir)


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current if current is not None else torch.device("cpu")


def save_reward_model(model: PreTrainedModel, tokenizer: Any, output_dir: str | Path) -> Path:
    """Write weights, configuration and tokenizer; the model is left in eval mode."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
