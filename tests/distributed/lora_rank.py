"""One rank of the LoRA trainer tests: trains, exports ten times, stops and resumes; rank 0 writes what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.step_batch import count_step, split_by_load
from openrlhf_ebft.distributed.full_tensors import full_adapters, full_weights
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.distributed.trainer_steps import STEPS, make_config, rank_passes, step_items


def lora_config(folder: Path, lora: dict, **overrides) -> EBFTConfig:
    config = make_config(folder / "model", **overrides)
    return config.model_copy(update={"lora": type(config.lora)(rank=4, alpha=8, **lora)})


def train(trainer: PolicyTrainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        items = step_items(step)
        counts = count_step([item.tree for item in items])
        objective = "sft" if step == 0 else "ebft"
        metrics.append(trainer.train_step(rank_passes(items, trainer), counts, objective, items[0]))
    return metrics


def adapters(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in full_adapters(trainer.engine.module)}


def base_values(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """What the base model says of the first step's trees: inner products of features, log-probabilities."""
    items = step_items(0)
    trees = [item.tree for item in items]
    parts = split_by_load([len(tree) for tree in trees], trainer.world_size)
    passes = max(len(part) for part in parts)
    depths = trainer.start_features((1,))
    grams = trainer.feature_grams([trees[i] for i in parts[trainer.rank]], passes, trees[0])
    mine = [[items[i]] for i in parts[trainer.rank]] + [[]] * (passes - len(parts[trainer.rank]))
    with trainer.without_adapters():
        logprobs = trainer.branch_logprobs(mine, items[0])
    gathered: list = [None] * trainer.world_size
    dist.all_gather_object(gathered, list(zip(parts[trainer.rank], grams, logprobs, strict=True)))
    values = {"depths": torch.tensor(depths)}
    for number, gram, logprob in (entry for part in gathered for entry in part):
        values |= {f"gram{number}": gram, f"logprobs{number}": logprob}
    return values


def main() -> None:
    folder, variants = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, variant in variants.items():
        config = lora_config(folder, variant.pop("lora", {}), **variant)
        trainer = PolicyTrainer(config, total_steps=STEPS)
        shards = [p for p in trainer.engine.module.parameters() if not p.requires_grad]
        before = [getattr(p, "ds_tensor", p).detach().clone() for p in shards]
        train(trainer, range(2))
        checkpoint = folder / f"{name}-checkpoint"
        trainer.save_checkpoint(checkpoint)
        base = base_values(trainer)  # between steps, which it must not disturb
        rest = train(trainer, range(2, STEPS))
        for _ in range(10):
            merged = {key: tensor.float().clone() for key, tensor in full_weights(trainer.engine.module)}
        after = [getattr(p, "ds_tensor", p).detach() for p in shards]
        is_intact = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        tree = step_items(0)[0].tree
        with trainer.without_adapters():
            base_score = trainer.score([tree], 1, tree)[0].nats
        trainer.save_model(folder / f"{name}-model")
        trained = adapters(trainer)
        resumed_trainer = PolicyTrainer(config, total_steps=STEPS)
        resumed_trainer.load_checkpoint(checkpoint)
        resumed_rest = train(resumed_trainer, range(2, STEPS))
        resumed = adapters(resumed_trainer)
        gathered: list = [None] * trainer.world_size
        dist.all_gather_object(gathered, is_intact)
        if trainer.rank == 0:
            save_file(base, folder / f"{name}-base.safetensors")
            save_file(merged, folder / f"{name}.safetensors")
            save_file(trained, folder / f"{name}-adapters.safetensors")
            record = {
                "intact": gathered,
                "resumed": all(torch.equal(trained[key], resumed[key]) for key in trained) and rest == resumed_rest,
                "base_score": base_score,
                "trainable": sum(p.requires_grad for p in trainer.engine.module.parameters()),
            }
            (folder / f"{name}.json").write_text(json.dumps(record))
        dist.barrier()
    trainer.close()


if __name__ == "__main__":
    main()
