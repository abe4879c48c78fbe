"""One rank of a trainer test: runs every named variant for three steps and saves the weights on rank 0."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.step_batch import TrainItem, count_step
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.distributed.trainer_steps import STEPS, make_config, rank_passes, step_items

SAVED = [f"{dtype}_zero{stage}_2" for dtype in ("float32", "bfloat16", "float16") for stage in range(4)]
"""Variants that leave a checkpoint behind."""


def run_variant(config: EBFTConfig, poisoned_step: int | None) -> tuple[PolicyTrainer, list[dict[str, float]]]:
    trainer = PolicyTrainer(config, total_steps=STEPS)
    metrics = []
    for step in range(STEPS):
        items = step_items(step)
        before = {key: tensor.clone() for key, tensor in trainer.named_weights()}
        if step == poisoned_step:
            items[0] = TrainItem(items[0].tree, torch.full_like(items[0].advantages, float("nan")))
        counts = count_step([item.tree for item in items])
        objective = "sft" if step == 0 else "ebft"
        metrics.append(trainer.train_step(rank_passes(items, trainer), counts, objective, items[0]))
        changed = [not torch.equal(before[key], tensor) for key, tensor in trainer.named_weights()]
        metrics[-1]["changed"] = float(any(changed))
    return trainer, metrics


def save_twice(trainer: PolicyTrainer, folder: Path, name: str) -> None:
    """A checkpoint, and another one that is written while the next step changes what it holds."""
    trainer.save_checkpoint(folder / f"{name}-checkpoint")
    trainer.save_checkpoint(folder / f"{name}-background", background=True)
    items = step_items(0)
    counts = count_step([item.tree for item in items])
    trainer.train_step(rank_passes(items, trainer), counts, "sft", items[0])
    while not trainer.checkpoint_is_written():
        time.sleep(0.01)
    dist.barrier()


def allow_float16_on_cpus() -> None:
    """DeepSpeed refuses float16 on CPUs without instructions for it, and so do we; slow ones will do for a test."""
    type(get_accelerator()).is_fp16_supported = lambda self: True


def main() -> None:
    folder, variants = Path(sys.argv[1]), json.loads(sys.argv[2])
    allow_float16_on_cpus()
    for name, overrides in variants.items():
        poisoned_step = overrides.pop("poisoned_step", None)
        trainer, metrics = run_variant(make_config(folder / "model", **overrides), poisoned_step)
        gathered: list = [None] * trainer.world_size
        dist.all_gather_object(gathered, metrics)
        weights = {key: tensor.float().clone() for key, tensor in trainer.named_weights()}
        tree = step_items(0)[0].tree
        scores = trainer.score([tree], 1, tree)
        if trainer.rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
            record = {"metrics": gathered, "scores": [(s.nats, s.tokens) for s in scores]}
            (folder / f"{name}.json").write_text(json.dumps(record))
        dist.barrier()
        if name in SAVED:
            save_twice(trainer, folder, name)
    trainer.close()


if __name__ == "__main__":
    main()
