"""The DeepSpeed policy trainer: one rank of it, as a plain class that runs with or without Ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.clipped_losses import ClipRange
from openrlhf_ebft.core.loss_terms import CompletionTokens, LossSettings, policy_terms, supervised_loss
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.seeding import derive_seed
from openrlhf_ebft.core.step_batch import StepCounts, TrainItem
from openrlhf_ebft.core.tree_batch import TreeBatch
from openrlhf_ebft.distributed.background_write import BackgroundWrite, copying, run_writes
from openrlhf_ebft.distributed.checkpoint_weights import ADAPTER_FOLDER, CHECKPOINT_TAG, require_plain_files
from openrlhf_ebft.distributed.deepspeed_config import deepspeed_config
from openrlhf_ebft.distributed.device import local_device
from openrlhf_ebft.distributed.ema import WeightAverage
from openrlhf_ebft.distributed.full_tensors import full_adapters, full_weights, weight_specs
from openrlhf_ebft.distributed.optimizer import build_optimizer, build_scheduler, keeping_settings
from openrlhf_ebft.distributed.policy_features import PolicyBaseFeatures
from openrlhf_ebft.distributed.policy_loading import load_policy
from openrlhf_ebft.distributed.process_group import join_ranks
from openrlhf_ebft.distributed.weight_sync import TensorSpec
from openrlhf_ebft.models.lora import LoRAAdapters, require_same_adapters, save_adapters
from openrlhf_ebft.models.policy import TreeLogprobs

Objective = Literal["ebft", "sft"]


def loss_settings(config: EBFTConfig) -> LossSettings:
    """The terms of the EBFT loss as the configuration weighs them."""
    policy = config.policy
    return LossSettings(
        policy_loss=policy.loss,
        aggregation=policy.aggregation,
        max_tokens=config.completion_limit,
        clip=ClipRange(policy.clip_low or 0.0, policy.clip_high or 0.0, policy.dual_clip),
        rl_coef=policy.rl_coef,
        ce_coef=policy.ce_coef,
        entropy_coef=policy.entropy_coef,
        kl_coef=policy.kl_coef,
        kl_estimator=policy.kl_estimator,
        sampler_cap=policy.tis_cap,
    )


def _joined(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """(B,) token values of all trees, or None when some tree has none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present).to(device) if len(present) == len(parts) else None


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
        join_ranks(self.device)
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
        self._loss_settings = loss_settings(config)
        self._average = self._start_average()
        self._written = BackgroundWrite([])
        self.step = 0  # applied optimizer steps: the version of the weights
        self.nonfinite_examples: list[str] = []  # of the last step: this rank's examples whose loss was not finite

    def _start_average(self) -> WeightAverage | None:
        decay = self.config.policy.ema_decay
        if decay is None:
            return None
        trained = {name: p for name, p in self.engine.module.named_parameters() if p.requires_grad}
        return WeightAverage(trained, decay, rank=self.rank, world_size=self.world_size)

    def train_step(
        self,
        passes: Sequence[Sequence[TrainItem]],
        counts: StepCounts,
        objective: Objective,
        filler: TrainItem,
    ) -> dict[str, float]:
        """Forward, backward and one optimizer step over this rank's share of the batch.

        Args:
            passes: this rank's trees, one forward and backward pass after the other; as many on every rank, empty
                ones included.
            counts: denominators over the whole batch, equal on all ranks.
            objective: `ebft` (REINFORCE plus cross-entropy) or `sft` (cross-entropy alone).
            filler: an item for empty passes; it gets weight zero.

        Returns:
            This rank's share of each loss term and metric (they add up over ranks), and `applied`, `grad_norm`,
            `learning_rate`, which are equal on all ranks. A step whose loss or gradient is not finite changes no
            weight and returns `applied` 0.
        """
        self.engine.train()
        self._seed_dropout()
        learning_rate = self.engine.optimizer.param_groups[0]["lr"]
        totals: dict[str, float] = {}
        self.nonfinite_examples = []
        for chunk in passes:
            used = chunk or [filler]
            batch = TreeBatch.collate([item.tree for item in used]).to(self.device)
            terms = self._loss_terms(self._forward(batch), batch, used, counts, objective)
            weight = 1.0 if chunk else 0.0
            # DeepSpeed averages gradients over ranks; the terms are shares of a global mean and must add up instead.
            self.engine.backward(terms["loss"] * (weight * self.world_size))
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + weight * float(value.detach())
            if chunk and not terms["loss"].isfinite():
                self.nonfinite_examples += [item.tree.example_id for item in chunk]
        applied, grad_norm = self._apply()
        self.step += int(applied)
        if applied and self._average is not None:
            self._average.update()
        return {**totals, "applied": float(applied), "grad_norm": grad_norm, "learning_rate": float(learning_rate)}

    def _seed_dropout(self) -> None:
        """Makes a step's dropout masks depend on run seed, step and rank alone, so that a resumed run repeats them."""
        if self.config.lora.is_on and self.config.lora.dropout > 0:
            torch.manual_seed(derive_seed(self.config.seed, "dropout", self.step, self.rank))

    def _forward(self, batch: TreeBatch) -> TreeLogprobs:
        if self.config.deepspeed.zero_stage < 3 or self.world_size == 1:
            return self.engine(batch)
        # Every call of the head gathers its weights from all ranks: they must call it equally often.
        num_chunks = torch.tensor(self.engine.module.num_chunks(batch), device=self.device)
        dist.all_reduce(num_chunks, op=dist.ReduceOp.MAX)
        return self.engine(batch, num_chunks=int(num_chunks))

    def _loss_terms(
        self,
        output: TreeLogprobs,
        batch: TreeBatch,
        items: Sequence[TrainItem],
        counts: StepCounts,
        objective: Objective,
    ) -> dict[str, Tensor]:
        mode = self.config.policy.aggregation
        ce = supervised_loss(output.supervised, batch.tree_of_supervised, counts.references, mode)
        if objective == "sft":
            return {"loss": ce, "ce_loss": ce}
        tokens = CompletionTokens(
            logprobs=output.branch,
            entropy=output.branch_entropy,
            sequence=batch.branch_of_token,
            advantages=batch.spread([item.advantages.to(self.device) for item in items]),
            sampler_logprobs=batch.sampler_logprobs,
            old_logprobs=_joined([item.old_logprobs for item in items], self.device),
            reference_logprobs=_joined([item.reference_logprobs for item in items], self.device),
        )
        return policy_terms(self._loss_settings, tokens, counts.completions, ce)

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
    def branch_logprobs(self, passes: Sequence[Sequence[TrainItem]], filler: TrainItem) -> list[Tensor]:
        """Log-probabilities (B,) of each of this rank's trees' completions, float32 on the CPU; collective.

        With the passes of `train_step`, an update on them starts with ratios of 1 to the bit.
        """
        self.engine.eval()
        results: list[Tensor] = []
        for chunk in passes:
            trees = [item.tree for item in chunk or [filler]]
            logprobs = self._forward(TreeBatch.collate(trees).to(self.device)).branch.cpu()
            results += logprobs.split([tree.branch_tokens.numel() for tree in trees])[: len(chunk)]
        return results

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

    @torch.no_grad()
    def start_features(self, special_ids: Collection[int]) -> list[int]:
        """Makes the base model the feature network too; returns the tapped depths. Collective.

        Raises RuntimeError without LoRA.
        """
        self._require_adapters()
        self.engine.eval()
        self._features = PolicyBaseFeatures(self.engine.module, self.config, special_ids)
        return self._features.layer_indices

    @torch.no_grad()
    def feature_grams(self, trees: Sequence[RolloutTree], num_passes: int, filler: RolloutTree) -> list[Tensor]:
        """Inner products of every group of this rank's trees; collective: see `PolicyBaseFeatures.group_grams`."""
        self.engine.eval()
        return self._features.group_grams(trees, num_passes, filler)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in full under Hugging Face names, adapters merged in; collective under ZeRO-3."""
        return full_weights(self.engine.module)

    def weight_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Names and full shapes of `named_weights`, as tensors of `dtype`, without gathering anything."""
        return weight_specs(self.engine.module, dtype)

    def update_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the rollout engines get: all weights, or adapters alone (lora.sync); collective under ZeRO-3."""
        return full_adapters(self.engine.module) if self.config.lora.sends_adapters else self.named_weights()

    def use_average(self, on: bool) -> None:
        """Puts the averaged weights in the place of the trained ones, or these back; collective.

        Scores, exports and updates of the engines then take the weights that are in place. Raises RuntimeError
        without policy.ema_decay.
        """
        if self._average is None:
            raise RuntimeError("policy.ema_decay is not set: there are no averaged weights")
        self._average.swap(use_average=on)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside the `with` block the policy is its frozen base model. Raises RuntimeError without LoRA."""
        with self._require_adapters().disabled():
            yield

    def _require_adapters(self) -> LoRAAdapters:
        adapters = self.engine.module.adapters
        if adapters is None:
            raise RuntimeError("lora.rank = 0: all weights train, so this policy holds no base model beside them")
        return adapters

    def save_model(self, folder: Path) -> None:
        """Writes the model in Hugging Face format, or the adapters in peft's, on rank 0; collective under ZeRO-3."""
        policy = self.engine.module
        state = {}
        for name, tensor in full_weights(policy) if policy.adapters is None else full_adapters(policy):
            if self.rank == 0:
                state[name] = tensor.cpu()
        if self.rank == 0 and policy.adapters is None:
            policy.model.save_pretrained(folder, state_dict=state)
        elif self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_adapters(folder, policy.adapters.config, state, self.config.model.path)
        dist.barrier()

    def save_checkpoint(self, folder: Path, *, background: bool = False) -> None:
        """Writes weights (only those that train), optimizer and schedule in DeepSpeed's format; collective.

        In the `background` this returns when everything is copied, and a thread writes the copies: see
        `checkpoint_is_written`. A save waits for the one before.
        """
        self._written.settle()
        with copying(self.engine) if background else nullcontext([]) as writes:
            self.engine.save_checkpoint(
                str(folder),
                tag=CHECKPOINT_TAG,
                client_state={"applied_steps": self.step},
                exclude_frozen_parameters=self.config.lora.is_on,
            )
        if self.config.lora.is_on:
            self.save_model(folder / ADAPTER_FOLDER)  # small: the adapters alone
        if self._average is not None:
            writes.append(self._average.saving(folder))
        if background:
            self._written = BackgroundWrite(writes)
        else:
            run_writes(writes)

    def checkpoint_is_written(self) -> bool:
        """Whether the thread of the last `save_checkpoint` is done, without waiting; raises what it raised."""
        return self._written.is_done()

    def load_checkpoint(self, folder: Path) -> None:
        """Reads what `save_checkpoint` wrote; collective.

        Raises RuntimeError when it does not fit this trainer, ValueError when a file could run code.
        """
        require_plain_files(folder)
        # With adapters the frozen weights come from model.path and are not in the checkpoint.
        is_whole = not self.config.lora.is_on
        if not is_whole:
            require_same_adapters(folder / ADAPTER_FOLDER, self._require_adapters())
        with keeping_settings(self.engine.optimizer, self.engine.lr_scheduler):
            path, client_state = self.engine.load_checkpoint(
                str(folder), tag=CHECKPOINT_TAG, load_module_strict=is_whole
            )
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")
        self.step = client_state["applied_steps"]
        if self._average is not None:
            self._average.load(folder)

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
