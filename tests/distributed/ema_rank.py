"""One rank of the EMA test: trains, compares the average with one made by hand, swaps, saves and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.step_batch import count_step
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.distributed.trainer_steps import STEPS, make_config, rank_passes, step_items

DECAY = 0.9
Weights = dict[str, torch.Tensor]


def train(trainer: PolicyTrainer, step: int) -> None:
    items = step_items(step)
    counts = count_step([item.tree for item in items])
    metrics = trainer.train_step(rank_passes(items, trainer), counts, "ebft", items[0])
    assert metrics["applied"] == 1.0


def weights_of(trainer: PolicyTrainer) -> Weights:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def average_of(trainer: PolicyTrainer) -> Weights:
    trainer.use_average(True)
    try:
        return weights_of(trainer)
    finally:
        trainer.use_average(False)


def largest_difference(left: Weights, right: Weights) -> float:
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def run(config: EBFTConfig, folder: Path) -> dict[str, float]:
    plain = PolicyTrainer(
        config.model_copy(update={"policy": config.policy.model_copy(update={"ema_decay": None})}), total_steps=STEPS
    )
    trainer = PolicyTrainer(config, total_steps=STEPS)
    expected = {name: tensor.double() for name, tensor in weights_of(trainer).items()}
    record = {"first": largest_difference(average_of(trainer), weights_of(trainer))}
    tree = step_items(0)[0].tree
    for step in range(STEPS):
        train(trainer, step)
        before = weights_of(trainer)
        expected = {name: DECAY * value + (1 - DECAY) * before[name].double() for name, value in expected.items()}
        score = trainer.score([tree], 1, tree)[0].nats
        trainer.use_average(True)
        averaged = weights_of(trainer)
        averaged_score = trainer.score([tree], 1, tree)[0].nats
        trainer.use_average(True)  # once more changes nothing
        trainer.use_average(False)
        after = weights_of(trainer)
        record[f"average_{step}"] = largest_difference(averaged, expected)
        record[f"moved_{step}"] = largest_difference(averaged, before)
        record[f"restored_{step}"] = float(all(torch.equal(after[name], before[name]) for name in before))
        record[f"score_restored_{step}"] = float(trainer.score([tree], 1, tree)[0].nats == score)
        record[f"score_moved_{step}"] = abs(averaged_score - score)
        if step == 1:
            trainer.save_checkpoint(folder)
        train(plain, step)
    record["like_plain"] = largest_difference(weights_of(trainer), weights_of(plain))
    resumed = PolicyTrainer(config, total_steps=STEPS)
    resumed.load_checkpoint(folder)
    train(resumed, STEPS - 1)
    record["resumed_average"] = largest_difference(average_of(resumed), average_of(trainer))
    record["resumed_weights"] = largest_difference(weights_of(resumed), weights_of(trainer))
    return record


def main() -> None:
    folder, variants = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, settings in variants.items():
        config = make_config(folder / "model", **settings)
        config.policy.ema_decay = DECAY
        config.optimizer.schedule = "constant"
        target = folder / f"checkpoint-{name}"
        target.mkdir(exist_ok=True)
        record = run(config, target)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(record))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
