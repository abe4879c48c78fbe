"""The DeepSpeed policy trainer: one rank of it, as a plain class that runs with or without Ray."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.losses import aggregate, on_policy_loss
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import StepCounts, TrainItem, micro_batches
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.distributed.deepspeed_config import deepspeed_config
from openrlhf_ebft.distributed.device import communication_backend, local_device
from openrlhf_ebft.distributed.optimizer import build_optimizer, build_scheduler
from openrlhf_ebft.distributed.policy_loading import load_policy
from openrlhf_ebft.distributed.weight_sync import TensorSpec, dtype_name
from openrlhf_ebft.models.policy import TreeLogprobs

Objective = Literal["ebft", "sft"]
_CHECKPOINT_TAG = "deepspeed"


@dataclass(frozen=True)
class SupervisedScore:
    """Cross-entropy of one reference's supervised tokens: sum in nats and number of tokens."""

    nats: float
    tokens: int


class PolicyTrainer:
    """Holds policy and optimizer; turns trees with advantages into optimizer steps.

    Collective: every rank must make the same calls in the same order, with the same number of micro-batches.
    """

    def __init__(self, config: EBFTConfig, *, total_steps: int) -> None:
        """Loads the model and starts DeepSpeed. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

        Args:
            config: the run's configuration.
            total_steps: optimizer steps of the whole run, for the schedule.
        """
        self.config = config
        self.device = local_device()
        if not dist.is_initialized():
            deepspeed.init_distributed(dist_backend=communication_backend(self.device))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        settings = deepspeed_config(config)
        policy = load_policy(config, settings, self.device)
        optimizer = build_optimizer(policy, config.optimizer)
        self.engine, _, _, _ = deepspeed.initialize(
            model=policy,
            optimizer=optimizer,
            config=settings,
            lr_scheduler=lambda wrapped: build_scheduler(wrapped, config.optimizer, total_steps),
            dist_init_required=False,
        )
        # Without ZeRO and mixed precision DeepSpeed neither checks nor reports the gradient: see _apply.
        self._plain_optimizer = config.deepspeed.zero_stage == 0 and config.model.dtype == "float32"
        if self._plain_optimizer:
            self.engine.enable_backward_allreduce = False
        self.step = 0  # applied optimizer steps: the version of the weights

    def train_step(
        self,
        items: Sequence[TrainItem],
        counts: StepCounts,
        num_micro_batches: int,
        objective: Objective,
        filler: TrainItem,
    ) -> dict[str, float]:
        """Forward, backward and one optimizer step over this rank's share of the batch.

        Args:
            items: this rank's trees; may be fewer than those of other ranks.
            counts: denominators over the whole batch, equal on all ranks.
            num_micro_batches: passes to run, equal on all ranks.
            objective: `ebft` (REINFORCE plus cross-entropy) or `sft` (cross-entropy alone).
            filler: an item for passes without any of this rank's own; it gets weight zero.

        Returns:
            This rank's share of each loss term and metric (they add up over ranks), and `applied`, `grad_norm`,
            `learning_rate`, which are equal on all ranks. A step whose loss or gradient is not finite changes no
            weight and returns `applied` 0.
        """
        self.engine.train()
        learning_rate = self.engine.optimizer.param_groups[0]["lr"]
        totals: dict[str, float] = {}
        for chunk in micro_batches(items, self.config.policy.micro_batch_size, num_micro_batches):
            used = chunk or [filler]
            batch = TreeBatch.collate([item.tree for item in used]).to(self.device)
            advantages = batch.spread([item.advantages.to(self.device) for item in used])
            terms = self._loss_terms(self._forward(batch), batch, advantages, counts, objective)
            weight = 1.0 if chunk else 0.0
            # DeepSpeed averages gradients over ranks; the terms are shares of a global mean and must add up instead.
            self.engine.backward(terms["loss"] * (weight * self.world_size))
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + weight * float(value.detach())
        applied, grad_norm = self._apply()
        self.step += int(applied)
        return {**totals, "applied": float(applied), "grad_norm": grad_norm, "learning_rate": float(learning_rate)}

    def _forward(self, batch: TreeBatch) -> TreeLogprobs:
        if self.config.deepspeed.zero_stage < 3 or self.world_size == 1:
            return self.engine(batch)
        # Every call of the head gathers its weights from all ranks: they must call it equally often.
        num_chunks = torch.tensor(self.engine.module.num_chunks(batch), device=self.device)
        dist.all_reduce(num_chunks, op=dist.ReduceOp.MAX)
        return self.engine(batch, num_chunks=int(num_chunks))

    def _loss_terms(
        self, output: TreeLogprobs, batch: TreeBatch, advantages: Tensor, counts: StepCounts, objective: Objective
    ) -> dict[str, Tensor]:
        policy, mode = self.config.policy, self.config.policy.aggregation
        # dr_grpo's constant is a limit of completions; references have none, so their tokens are simply averaged.
        ce_mode = "token_mean" if mode == "dr_grpo" else mode
        ce = aggregate(-output.supervised, batch.tree_of_supervised, counts.references, ce_mode)
        if objective == "sft":
            return {"loss": ce, "ce_loss": ce}
        sequence, count = batch.branch_of_token, counts.completions
        limit = self.config.completion_limit
        rl = aggregate(on_policy_loss(output.branch, advantages), sequence, count, mode, limit)
        entropy = aggregate(output.branch_entropy, sequence, count, mode, limit)
        mismatch = output.branch.detach() - batch.sampler_logprobs
        return {
            "loss": policy.rl_coef * rl + policy.ce_coef * ce - policy.entropy_coef * entropy,
            "rl_loss": rl,
            "ce_loss": ce,
            "entropy": entropy,
            "sampler_kl": aggregate(-mismatch, sequence, count, "token_mean"),
            "sampler_mismatch": aggregate(mismatch.abs(), sequence, count, "token_mean"),
        }

    def _apply(self) -> tuple[bool, float]:
        if not self._plain_optimizer:
            self.engine.step()
            return self.engine.was_step_applied(), float(self.engine.get_global_grad_norm())
        self.engine.buffered_allreduce_fallback()
        grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            self.engine.zero_grad()
            return False, norm
        self.engine.step()
        return True, norm

    @torch.no_grad()
    def score(self, trees: Sequence[RolloutTree], num_passes: int, filler: RolloutTree) -> list[SupervisedScore]:
        """Cross-entropy of the supervised tokens of each of this rank's trees; collective like `train_step`."""
        self.engine.eval()
        scores = []
        for number in range(num_passes):
            tree = trees[number] if number < len(trees) else filler
            batch = TreeBatch.collate([RolloutTree.without_branches(tree.reference)]).to(self.device)
            nats = -self._forward(batch).supervised.double().sum()
            scores.append(SupervisedScore(float(nats), batch.supervised_targets.numel()))
        return scores[: len(trees)]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names, tied ones under each of their names; collective under ZeRO-3."""
        model = self.engine.module.model
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not hasattr(parameter, "ds_id"):
                yield name, parameter.detach()
                continue
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def weight_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Names and full shapes of `named_weights`, as tensors of `dtype`, without gathering anything."""
        named = self.engine.module.model.named_parameters(remove_duplicate=False)
        return [TensorSpec(name, tuple(getattr(p, "ds_shape", p.shape)), dtype_name(dtype)) for name, p in named]

    def save_model(self, folder: Path) -> None:
        """Writes the model in Hugging Face format on rank 0; collective under ZeRO-3."""
        state = {}
        for name, tensor in self.named_weights():
            if self.rank == 0:
                state[name] = tensor.cpu()
        if self.rank == 0:
            self.engine.module.model.save_pretrained(folder, state_dict=state)
        dist.barrier()

    def save_checkpoint(self, folder: Path) -> None:
        """Writes weights, optimizer and schedule in DeepSpeed's format; collective."""
        self.engine.save_checkpoint(str(folder), tag=_CHECKPOINT_TAG, client_state={"applied_steps": self.step})

    def load_checkpoint(self, folder: Path) -> None:
        """Reads what `save_checkpoint` wrote; collective. Raises RuntimeError when it does not fit this trainer."""
        path, client_state = self.engine.load_checkpoint(str(folder), tag=_CHECKPOINT_TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        self.step = client_state["applied_steps"]

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
