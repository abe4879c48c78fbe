"""Ray shell of the policy trainer's ranks, and the group that drives them in step."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray import ObjectRef
from ray.util import get_node_ip_address
from torch import Tensor

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Crew
from openrlhf_ebft.actors.waiting import ActorError, wait_for
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import StepCounts, TrainItem, count_step, deal_passes, split_by_load
from openrlhf_ebft.core.step_rewards import GroupProducts
from openrlhf_ebft.core.update_plan import combine_updates, plan_updates
from openrlhf_ebft.distributed.device import set_compute_threads
from openrlhf_ebft.distributed.native_transfer import EngineCall, EngineFleet, NamedTensorSource, NativeSender
from openrlhf_ebft.distributed.policy_trainer import Objective, PolicyTrainer, SupervisedScore
from openrlhf_ebft.distributed.weight_sync import WeightUpdate, build_update
from openrlhf_ebft.models.loading import DTYPES

NativeBackend = Literal["nccl", "ipc"]
_ALIKE_ON_RANKS = ("applied", "grad_norm", "learning_rate")


class PolicyTrainerActor:
    """One rank of the trainer in a Ray worker."""

    def __init__(self, config: EBFTConfig, rank: int, special_ids: Collection[int]) -> None:
        start_pulse()
        self._config = config
        self._special_ids = special_ids
        self._rank = rank
        set_compute_threads(config.placement.threads_per_actor)

    def address(self) -> tuple[str, int]:
        """Host and a free port of this node, for the ranks to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return get_node_ip_address(), probe.getsockname()[1]

    def start(self, address: tuple[str, int], total_steps: int) -> None:
        """Joins the other ranks and loads the model; returns when all ranks have."""
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK="0",  # Ray shows each actor only its own devices
            WORLD_SIZE=str(self._config.policy.num_ranks),
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
        )
        self._trainer = PolicyTrainer(self._config, total_steps=total_steps)
        if self._config.base_model_gives_features:
            self._layers = self._trainer.start_features(self._special_ids)

    def layer_indices(self) -> list[int]:
        """Tapped depths of the base model, where it is the feature network."""
        return self._layers

    def products(self, trees: Sequence[RolloutTree], num_passes: int, filler: RolloutTree) -> GroupProducts:
        """Inner products of every tree's groups under the base model."""
        grams = self._trainer.feature_grams(trees, num_passes, filler)
        return [(tree.example_id, gram) for tree, gram in zip(trees, grams, strict=True)]

    def train_step(
        self,
        passes: Sequence[Sequence[TrainItem]],
        counts: StepCounts,
        objective: Objective,
        filler: TrainItem,
    ) -> dict[str, float]:
        return self._trainer.train_step(passes, counts, objective, filler)

    def branch_logprobs(self, passes: Sequence[Sequence[TrainItem]], filler: TrainItem, base: bool) -> list[Tensor]:
        with self._trainer.without_adapters() if base else nullcontext():
            return self._trainer.branch_logprobs(passes, filler)

    def use_average(self, on: bool) -> None:
        self._trainer.use_average(on)

    def score(self, trees: Sequence[RolloutTree], num_passes: int, filler: RolloutTree) -> list[SupervisedScore]:
        return self._trainer.score(trees, num_passes, filler)

    def export_update(self) -> WeightUpdate | None:
        """Puts the weights into the object store; rank 0 returns the update that refers to them."""
        weights = self._trainer.update_tensors()
        if self._rank > 0:
            for _ in weights:  # takes part in gathering shards
                continue
            return None
        dtype = DTYPES[self._config.model.dtype]
        return build_update(self._trainer.step, weights, dtype=dtype, store=ray.put)

    def connect_engines(
        self, engines: Sequence[Any], backend: Literal["nccl", "ipc"], address: tuple[str, int]
    ) -> None:
        """Joins the GPU transfer group of the rollout engines."""
        limit = self._config.rollout.timeout_s
        calls = [_bounded_call(engine, limit) for engine in engines]
        self._sender = NativeSender(
            backend,
            rank=self._rank,
            fleet=EngineFleet(calls, self._config.rollout.tensor_parallel_size),
            source=NamedTensorSource(
                self._trainer.weight_specs(DTYPES[self._config.model.dtype]), self._trainer.named_weights
            ),
            address=address[0],
            port=address[1],
        )

    def send_weights(self) -> None:
        self._sender.send(self._trainer.step)

    def save_model(self, folder: Path) -> None:
        """Writes the model in Hugging Face format (rank 0; the others take part in gathering shards)."""
        self._trainer.save_model(folder)

    def save_checkpoint(self, folder: Path, background: bool) -> None:
        self._trainer.save_checkpoint(folder, background=background)

    def checkpoint_is_written(self) -> bool:
        """Whether the last `save_checkpoint` in the background has written all; raises what its thread raised."""
        return self._trainer.checkpoint_is_written()

    def nonfinite_examples(self) -> list[str]:
        """Examples of this rank whose loss was not finite in the last step."""
        return self._trainer.nonfinite_examples

    def checkpoint_bytes(self) -> int:
        """Upper bound of a checkpoint's size over all ranks: 16 bytes for each weight that trains."""
        parameters = list(self._trainer.engine.module.parameters())
        return sum(
            getattr(p, "ds_numel", p.numel()) * (16 if p.requires_grad else p.element_size()) for p in parameters
        )

    def load_checkpoint(self, folder: Path) -> int:
        """Returns the number of applied optimizer steps."""
        self._trainer.load_checkpoint(folder)
        return self._trainer.step


def _bounded_call(engine: Any, timeout_s: float) -> EngineCall:
    return lambda method, argument: ray.get(engine.transfer.remote(method, argument), timeout=timeout_s)


def _pick(items: Sequence[TrainItem], passes: Sequence[Sequence[int]]) -> list[list[TrainItem]]:
    return [[items[number] for number in numbers] for numbers in passes]


class PolicyTrainerGroup:
    """All ranks of the trainer. Every method waits for all of them.

    Raises `StateLost` from every method when a rank is gone or hangs: the other ranks wait for it, and what it held is
    in the checkpoints alone. `restart` is the way on.
    """

    def __init__(self, crew: Crew, config: EBFTConfig) -> None:
        self._crew = crew
        self._config = config
        self._timeout_s = config.policy.timeout_s
        self._total_steps = 0
        self.version = 0  # applied optimizer steps
        self._nonfinite: list[str] = []

    @property
    def _ranks(self) -> list[Any]:
        return self._crew.handles

    def start(self, total_steps: int, timeout_s: float, phase: str) -> None:
        """Loads the model on every rank; `total_steps` is the length of the learning-rate schedule."""
        self._total_steps = total_steps
        (address,) = self._wait(phase, [self._ranks[0].address.remote()], timeout_s, watched=False)
        calls = [rank.start.remote(address, total_steps) for rank in self._ranks]
        self._wait(phase, calls, timeout_s, watched=False)

    def restart(self) -> None:
        """Starts every rank afresh, with the model of model.path; waits."""
        for number in range(len(self._crew)):
            self._crew.replace(number)
        self.version = 0
        phase = "restart (limit: placement.start_timeout_s)"
        self.start(self._total_steps, self._config.placement.start_timeout_s, phase)

    def _wait(
        self, phase: str, calls: Sequence[ObjectRef], timeout_s: float | None = None, *, watched: bool = True
    ) -> list[Any]:
        names, pulses = self._crew.names[: len(calls)], self._crew.pulses[: len(calls)] if watched else []
        try:
            return wait_for(phase, names, calls, self._timeout_s if timeout_s is None else timeout_s, pulses)
        except ActorError as failure:
            raise self._crew.loss_behind(failure) from failure

    def train_batch(self, items: Sequence[TrainItem]) -> dict[str, float]:
        """All EBFT updates on one batch of rollouts (policy.updates_per_batch), up to one that is not applied.

        Returns metrics over all of them.
        """
        policy = self._config.policy
        plan = plan_updates(len(items), policy.updates_per_batch, policy.mini_batches)
        if len(plan) > 1:
            old = self.branch_logprobs(items)
            items = [replace(item, old_logprobs=values) for item, values in zip(items, old, strict=True)]
        metrics: list[dict[str, float]] = []
        for part in plan:
            metrics.append(self.train_step([items[i] for i in part], "ebft"))
            if not metrics[-1]["applied"]:
                break  # the same completions would come again
        return combine_updates(metrics, planned=len(plan))

    def branch_logprobs(self, items: Sequence[TrainItem], *, base: bool = False) -> list[Tensor]:
        """Log-probabilities (B,) of each tree's completions, float32 on the CPU.

        They are those of the present policy, or of its `base` model, without adapters.
        """
        dealt, smallest = self._deal(items)
        calls = [
            rank.branch_logprobs.remote(_pick(items, passes), smallest, base)
            for rank, passes in zip(self._ranks, dealt, strict=True)
        ]
        results = self._wait("log-probabilities", calls)
        logprobs: dict[int, Tensor] = {}
        for passes, result in zip(dealt, results, strict=True):
            logprobs.update(zip((number for numbers in passes for number in numbers), result, strict=True))
        return [logprobs[number] for number in range(len(items))]

    def _deal(self, items: Sequence[TrainItem]) -> tuple[list[list[list[int]]], TrainItem]:
        """Item numbers of every rank's passes, and the item that fills up empty passes."""
        policy, sizes = self._config.policy, [len(item.tree) for item in items]
        limits = {"micro_batch_size": policy.micro_batch_size, "max_tokens": policy.max_tokens_per_micro_batch}
        return deal_passes(sizes, len(self._ranks), **limits), min(items, key=lambda item: len(item.tree))

    def train_step(self, items: Sequence[TrainItem], objective: Objective) -> dict[str, float]:
        """One optimizer step over all items, dealt out by size; metrics of the whole step."""
        counts = count_step([item.tree for item in items])
        dealt, smallest = self._deal(items)
        calls = [
            rank.train_step.remote(_pick(items, passes), counts, objective, smallest)
            for rank, passes in zip(self._ranks, dealt, strict=True)
        ]
        results = self._wait("train", calls)
        if not results[0]["applied"]:
            examples = self._wait("train", [rank.nonfinite_examples.remote() for rank in self._ranks])
            self._nonfinite += [example for part in examples for example in part]
        self.version += int(results[0]["applied"])
        totals = {key: sum(result[key] for result in results) for key in results[0] if key not in _ALIKE_ON_RANKS}
        return totals | {key: results[0][key] for key in _ALIKE_ON_RANKS}

    def layer_indices(self) -> list[int]:
        """Tapped depths of the base model, where it is the feature network (features.source: policy_base)."""
        return self._wait("start", [self._ranks[0].layer_indices.remote()])[0]

    def products(self, trees: Sequence[RolloutTree]) -> list[ObjectRef]:
        """References to the `GroupProducts` of all trees under the base model; waits until all are computed."""
        parts = split_by_load([len(tree) for tree in trees], len(self._ranks))
        passes = max(len(part) for part in parts)
        smallest = min(trees, key=len)
        calls = [
            rank.products.remote([trees[i] for i in part], passes, smallest)
            for rank, part in zip(self._ranks, parts, strict=True)
        ]
        self._wait("features", calls)
        return calls

    def score(self, trees: Sequence[RolloutTree]) -> list[SupervisedScore]:
        """Cross-entropy of each tree's supervised tokens, in the order of the trees."""
        parts = split_by_load([tree.num_reference_tokens for tree in trees], len(self._ranks))
        passes = max(len(part) for part in parts)
        calls = [
            rank.score.remote([trees[i] for i in part], passes, trees[0])
            for rank, part in zip(self._ranks, parts, strict=True)
        ]
        results = self._wait("score", calls)
        scores: dict[int, SupervisedScore] = {}
        for part, result in zip(parts, results, strict=True):
            scores.update(zip(part, result, strict=True))
        return [scores[number] for number in range(len(trees))]

    def export_update(self) -> WeightUpdate:
        """The current weights as an update of references into the object store."""
        calls = [rank.export_update.remote() for rank in self._ranks]
        return self._wait("weight export", calls)[0]

    def connect_engines(self, engines: Sequence[Any], backend: NativeBackend) -> None:
        """Every rank joins the GPU transfer group of the engines."""
        (address,) = self._wait("weight sync", [self._ranks[0].address.remote()])
        calls = [rank.connect_engines.remote(list(engines), backend, address) for rank in self._ranks]
        self._wait("weight sync", calls)

    def send_weights(self) -> None:
        """Sends the current weights to the engines of `connect_engines`."""
        self._wait("weight sync", [rank.send_weights.remote() for rank in self._ranks])

    def use_average(self, on: bool) -> None:
        """Puts the averaged weights (policy.ema_decay) in the place of the trained ones, or these back."""
        self._wait("weight average", [rank.use_average.remote(on) for rank in self._ranks])

    def save_model(self, folder: Path) -> None:
        """Writes the model to `folder`, which must be reachable from rank 0."""
        self._wait("save model", [r.save_model.remote(folder) for r in self._ranks])

    def save_checkpoint(self, folder: Path, *, background: bool = False) -> None:
        """Every rank writes its part of weights, optimizer and schedule to `folder`.

        In the `background`: this returns when every rank has copied its part, and `checkpoint_is_written` tells when
        the copies are on disk.
        """
        calls = [rank.save_checkpoint.remote(folder, background) for rank in self._ranks]
        self._wait("save checkpoint", calls)

    def checkpoint_is_written(self) -> bool:
        """Whether all ranks have written what they copied. Raises ActorError with the text of one that failed."""
        return all(self._wait("write checkpoint", [rank.checkpoint_is_written.remote() for rank in self._ranks]))

    def take_nonfinite_examples(self) -> list[str]:
        """Examples whose loss was not finite, in steps since the last call."""
        taken, self._nonfinite = self._nonfinite, []
        return taken

    def checkpoint_bytes(self) -> int:
        """Upper bound of a checkpoint's size."""
        return self._wait("save checkpoint", [self._ranks[0].checkpoint_bytes.remote()])[0]

    def load_checkpoint(self, folder: Path) -> None:
        """Every rank reads its part; the number of ranks and the ZeRO stage must be those that wrote it."""
        calls = [rank.load_checkpoint.remote(folder) for rank in self._ranks]
        self.version = self._wait("load checkpoint", calls)[0]
