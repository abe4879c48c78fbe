"""The rank of the test of empty completions: one step without any completion token, one that mixes both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import TrainItem, count_step, without_advantages
from openrlhf_ebft.distributed.policy_trainer import PolicyTrainer
from tests.trees import make_reference, make_tree


def make_item(seed: int, *, empty: bool) -> TrainItem:
    """A tree with 2 completions, or with none at all when `empty`."""
    reference = make_reference(8, [4], seed=seed)
    if empty:
        return without_advantages(RolloutTree.without_branches(reference))
    return TrainItem(make_tree(reference, [[3, 2]], seed=seed), torch.tensor([[1.0, -0.5]]))


def train(config: EBFTConfig, items: list[TrainItem], target: Path) -> dict[str, float]:
    trainer = PolicyTrainer(config, total_steps=1)
    counts = count_step([item.tree for item in items])
    size = config.policy.micro_batch_size
    passes = [items[start : start + size] for start in range(0, len(items), size)]
    metrics = trainer.train_step(passes, counts, "ebft", items[0])
    save_file({key: tensor.clone() for key, tensor in trainer.named_weights()}, target)
    return metrics


def main() -> None:
    folder, variants = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, policy in variants.items():
        config = EBFTConfig(
            name="test",
            model={"path": str(folder / "model"), "dtype": "float32"},
            data={"path": "unused"},
            policy={"prompts_per_step": 4, "ce_coef": 0.0, **policy},
            optimizer={"learning_rate": 1e-2},
        )
        empty = train(config, [make_item(i, empty=True) for i in range(4)], folder / f"{name}-empty.safetensors")
        mixed = [make_item(i, empty=i % 2 == 0) for i in range(4)]
        train(config, mixed, folder / f"{name}-mixed.safetensors")
        (folder / f"{name}.json").write_text(json.dumps({"empty": empty}))


if __name__ == "__main__":
    main()
