"""One rank of the test of several updates on one batch: ratios, KL term and importance weights inside the trainer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from openrlhf_ebft.actors.reference_model import load_reference_model
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.step_batch import TrainItem, count_step
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.distributed.trainer_steps import make_config, rank_passes, step_items

BATCHES = 2
LEARNING_RATE = 2e-3
EPS = 1e-4  # with AdamW's usual 1e-8 a gradient that is all rounding noise moves a weight as far as any other


def batch_items(batch: int, model: Path) -> list[TrainItem]:
    """Trees whose sampler and reference model are each a little off the model in `model`."""
    generator = torch.Generator().manual_seed(batch)
    items = step_items(batch)
    exact = load_reference_model(make_config(model)).logprobs([item.tree for item in items])
    moved = []
    for item, logprobs in zip(items, exact, strict=True):
        sampler, reference = (logprobs + 0.4 * torch.randn(len(logprobs), generator=generator) for _ in range(2))
        moved.append(replace(item, tree=replace(item.tree, sampler_logprobs=sampler), reference_logprobs=reference))
    return moved


def run_variant(config: EBFTConfig) -> tuple[PolicyTrainer, list[dict[str, float]]]:
    updates = config.policy.updates_per_batch
    trainer = PolicyTrainer(config, total_steps=BATCHES * updates)
    metrics = []
    for batch in range(BATCHES):
        items = batch_items(batch, Path(config.model.path))
        counts = count_step([item.tree for item in items])
        passes = rank_passes(items, trainer)
        if updates > 1:
            old = iter(trainer.branch_logprobs(passes, items[0]))
            passes = [[replace(item, old_logprobs=next(old)) for item in chunk] for chunk in passes]
        for _ in range(updates):
            metrics.append(trainer.train_step(passes, counts, "ebft", items[0]))
    return trainer, metrics


def compare_with_reference(trainer: PolicyTrainer) -> dict[str, float]:
    """The trained policy, and its base model without adapters, against a reference model of its own."""
    items = batch_items(0, Path(trainer.config.model.path))
    passes = rank_passes(items, trainer)
    expected = load_reference_model(trainer.config).logprobs([item.tree for chunk in passes for item in chunk])
    with trainer.without_adapters():
        base = trainer.branch_logprobs(passes, items[0])
    policy = trainer.branch_logprobs(passes, items[0])

    def difference(values: list[torch.Tensor]) -> float:
        return max(float((value - other).abs().max()) for value, other in zip(values, expected, strict=True))

    return {"base_difference": difference(base), "policy_difference": difference(policy)}


def main() -> None:
    folder, variants = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, overrides in variants.items():
        policy, rank = overrides.pop("policy"), overrides.pop("lora_rank", 0)
        config = make_config(folder / "model", **overrides)
        config = config.model_copy(
            update={"policy": type(config.policy)(**{**config.policy.model_dump(exclude_unset=True), **policy})}
        )
        config.optimizer.schedule = "constant"
        config.lora.rank = rank
        config.optimizer.learning_rate, config.optimizer.eps = LEARNING_RATE, EPS
        trainer, metrics = run_variant(config)
        gathered: list = [None] * trainer.world_size
        if rank:
            metrics[-1] |= compare_with_reference(trainer)
        dist.all_gather_object(gathered, metrics)
        weights = {key: tensor.float().clone() for key, tensor in trainer.named_weights()}
        if trainer.rank == 0:
            save_file(weights, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(gathered))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
