"""How much memory each actor needs for weights and optimizer states: an estimate from files' headers, without loading.

Activations, logits and the buffers of libraries come on top; they depend on lengths and batch sizes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from openrlhf_ebft.actors.placement import ENGINE, FEATURES, REFERENCE, TRAINER
from openrlhf_ebft.config.sections import EBFTConfig

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = re.compile(r"\.(?:layers|layer|h|blocks)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|score)\.")


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, as its checkpoint's headers give them.

    `by_block` counts those of each block, `rest` embeddings and final norm, `head` an untied output head, and
    `matrix_sides` adds up rows + columns of every matrix in the blocks: a rank-1 adapter has as many parameters.
    """

    by_block: tuple[int, ...]
    rest: int
    head: int = 0
    matrix_sides: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_block) + self.rest + self.head

    def up_to(self, fraction: float) -> int:
        """Parameters of embeddings and the first blocks, down to a depth given as a fraction."""
        return self.rest + sum(self.by_block[: max(1, ceil(fraction * len(self.by_block)))])


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that one actor of a role needs where it computes, and in host memory beside that."""

    role: str
    device: float
    host: float = 0.0


def read_model_size(folder: Path) -> ModelSize | None:
    """Counts the parameters of a local folder's safetensors files; None when it has none."""
    blocks: dict[int, int] = {}
    rest = head = sides = 0
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        for name, shape in _shapes(file).items():
            size, match = prod(shape), _BLOCK.search("." + name)
            if match is not None:
                number = int(match[1])
                blocks[number] = blocks.get(number, 0) + size
                sides += sum(shape) if len(shape) == 2 else 0
            elif _HEAD.search(name):
                head += size
            else:
                rest += size
    if not files:
        return None
    return ModelSize(tuple(blocks[number] for number in sorted(blocks)), rest, head, sides)


def _shapes(file: Path) -> dict[str, list[int]]:
    """Names and shapes in a safetensors file: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def estimate_memory(
    config: EBFTConfig,
    policy: ModelSize,
    features: ModelSize,
    reference: ModelSize,
    *,
    gpu_bytes: float | None = None,
) -> list[RoleMemory]:
    """Memory of one actor of each role that holds a model.

    Args:
        config: the run's configuration.
        policy: size of model.path.
        features: size of the feature network's model, whole.
        reference: size of the reference model.
        gpu_bytes: memory of a GPU, of which a vLLM engine takes its share at once; None on CPUs.
    """
    model = config.model
    needs = [_trainer(config, policy)]
    if config.samples_completions:
        needs.append(RoleMemory(ENGINE, _engine(config, policy.total * _BYTES[model.dtype], gpu_bytes)))
    if config.has_feature_actors:
        deepest = features.up_to(max(config.features.layer_fractions))
        needs.append(RoleMemory(FEATURES, deepest * _BYTES[config.features.dtype or model.dtype]))
    if config.has_reference_actors:
        needs.append(RoleMemory(REFERENCE, reference.total * _BYTES[config.reference.dtype or model.dtype]))
    return needs


def _trainer(config: EBFTConfig, policy: ModelSize) -> RoleMemory:
    """One rank: weights, gradients (gathered in float32 beside the pass's own precision) and AdamW's states.

    With bfloat16 a float32 copy of the weights belongs to the states. ZeRO 1 shards the states over the ranks, 2 the
    gathered gradients as well, 3 the weights, too. An average of the weights (policy.ema_decay) is always in shards.
    Checkpoints in the background are copied into host memory before they are written.
    """
    size, ranks, stage = _BYTES[config.model.dtype], config.policy.num_ranks, config.deepspeed.zero_stage
    trained = config.lora.rank * policy.matrix_sides if config.lora.is_on else policy.total
    weights = (policy.total + (trained if config.lora.is_on else 0)) * size
    gradients = trained * (4 + (size if size < 4 else 0))
    states = trained * (8 + (4 if size < 4 else 0))
    states /= ranks if stage >= 1 or size < 4 else 1
    gradients /= ranks if stage >= 2 else 1
    weights /= ranks if stage == 3 else 1
    weights += trained * 4 / ranks if config.policy.ema_decay is not None else 0  # the average, always in pieces
    copies = trained * size + states if config.checkpoint.background else 0.0  # of what rank 0 writes
    if config.deepspeed.offload_optimizer:
        return RoleMemory(TRAINER, weights + gradients, states + copies)
    return RoleMemory(TRAINER, weights + gradients + states, copies)


def _engine(config: EBFTConfig, weights: float, gpu_bytes: float | None) -> float:
    rollout = config.rollout
    if rollout.engine == "vllm" and gpu_bytes is not None:
        return rollout.gpu_memory_utilization * gpu_bytes
    cache = rollout.kv_cache_gib * GIB if rollout.engine == "vllm" else 0.0
    return weights / rollout.tensor_parallel_size + cache


def checkpoint_bytes(config: EBFTConfig, policy: ModelSize) -> float:
    """Disk that the run's checkpoints and final model take at the most, in bytes."""
    size = _BYTES[config.model.dtype]
    trained = config.lora.rank * policy.matrix_sides if config.lora.is_on else policy.total
    average = 4 if config.policy.ema_decay is not None else 0
    one = policy.total * size + trained * (8 + (4 if size < 4 else 0) + average)
    writes = config.checkpoint.every_steps or config.checkpoint.on_interrupt
    # A new checkpoint is written beside the kept ones before the oldest goes.
    models = 2 if config.policy.export_ema else 1
    return one * (config.checkpoint.keep_last + 1 if writes else 0) + policy.total * size * models
