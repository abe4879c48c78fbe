"""Weight updates from the policy trainer to the rollout engines: what is sent, and the checks on both sides.

The trainer turns its parameters into chunks and a manifest (`build_update`); an engine compares the manifest and the
chunks with the tensors that it expects (`check_manifest`, `check_chunks`) before it changes anything, and publishes
the version last. How chunks travel is the caller's business: `store` and `fetch` are functions handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Chunk = dict[str, Tensor]  # checkpoint name -> tensor on the CPU
Store = Callable[[Chunk], Any]  # puts a chunk where engines can reach it, returns its handle
Fetch = Callable[[Any], Chunk]  # turns a handle back into a chunk

_LISTED_PROBLEMS = 8


class WeightSyncError(RuntimeError):
    """An update was refused or failed; the text says which tensors and whether the old weights are intact."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: Hugging Face name, full shape, dtype without the `torch.` prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """Describes `tensor`."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """All weights of one policy version."""

    version: int  # optimizer steps behind these weights
    manifest: tuple[TensorSpec, ...]  # every tensor in `chunks`, in order
    chunks: tuple[Any, ...]  # chunks, or the handles that `fetch` turns into chunks


@dataclass(frozen=True)
class ExpectedWeights:
    """The tensors that an engine's model has.

    `tied` groups names that share one tensor (input embedding and output head, mostly): an update must carry at
    least one of each group, and the engine fills in the others.
    """

    specs: Mapping[str, TensorSpec]
    tied: tuple[tuple[str, ...], ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def export_weights(
    named_tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int, dtype: torch.dtype
) -> Iterator[Chunk]:
    """Cuts a model's tensors into chunks of at most `chunk_bytes` (a larger tensor is a chunk of its own).

    Floating tensors are cast to `dtype`, the rollout engine's. Every tensor is a copy on the CPU, so that the next
    optimizer step cannot reach into a chunk that still travels. `named_tensors` is read one tensor at a time: a
    generator that gathers ZeRO-3 shards needs memory for one full tensor only.

    Raises:
        ValueError: `chunk_bytes` is not positive, a name comes twice, or there is no tensor at all.
    """
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    chunk: Chunk = {}
    size = 0
    seen: set[str] = set()
    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"weight export: {name} comes twice")
        seen.add(name)
        target = dtype if tensor.is_floating_point() else tensor.dtype
        tensor_bytes = tensor.numel() * target.itemsize
        if chunk and size + tensor_bytes > chunk_bytes:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor.detach().to("cpu", target, copy=True).contiguous()
        size += tensor_bytes
    if not seen:
        raise ValueError("weight export: the model has no tensors")
    yield chunk


def build_update(
    version: int,
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    chunk_bytes: int = 256 * 2**20,
    store: Store = lambda chunk: chunk,
) -> WeightUpdate:
    """Exports a model as an update; `store` puts each chunk away as soon as it is full.

    Args:
        version: optimizer steps behind these weights.
        named_tensors: full tensors under Hugging Face names, as `model.state_dict().items()` gives them.
        dtype: dtype of the rollout engine.
        chunk_bytes: size limit of a chunk.
        store: returns a handle of a chunk; by default the chunk itself.

    Raises:
        ValueError: see `export_weights`.
    """
    manifest: list[TensorSpec] = []
    handles: list[Any] = []
    for chunk in export_weights(named_tensors, chunk_bytes, dtype):
        manifest.extend(TensorSpec.of(name, tensor) for name, tensor in chunk.items())
        handles.append(store(chunk))
    return WeightUpdate(version, tuple(manifest), tuple(handles))


def check_manifest(manifest: Sequence[TensorSpec], expected: ExpectedWeights) -> None:
    """Compares what will come with what the engine has.

    Raises:
        WeightSyncError: names every missing, unknown, repeated or misshapen tensor (the first few of many).
    """
    counts = Counter(spec.name for spec in manifest)
    problems = [f"{name} comes {count} times" for name, count in counts.items() if count > 1]
    fillable = {name for group in expected.tied if any(other in counts for other in group) for name in group}
    problems += [f"missing: {spec}" for name, spec in expected.specs.items() if name not in counts.keys() | fillable]
    for spec in manifest:
        wanted = expected.specs.get(spec.name)
        if wanted is None:
            problems.append(f"unknown: {spec}")
        elif (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
            problems.append(
                f"{spec.name}: got {list(spec.shape)} {spec.dtype}, expected {list(wanted.shape)} {wanted.dtype}"
            )
    _refuse(problems)


def check_chunks(chunks: Sequence[Chunk], manifest: Sequence[TensorSpec]) -> None:
    """Compares what came with what the manifest announced.

    Raises:
        WeightSyncError: names every tensor that is absent, extra, repeated or not as announced.
    """
    announced = {spec.name: spec for spec in manifest}
    arrived = Counter(name for chunk in chunks for name in chunk)
    problems = [f"announced but not delivered: {spec}" for name, spec in announced.items() if name not in arrived]
    problems += [f"delivered {count} times: {name}" for name, count in arrived.items() if count > 1]
    for chunk in chunks:
        for name, tensor in chunk.items():
            spec = TensorSpec.of(name, tensor)
            if name not in announced:
                problems.append(f"delivered but not announced: {spec}")
            elif spec != announced[name]:
                problems.append(f"delivered {spec}, announced {announced[name]}")
    _refuse(problems)


def fill_tied(chunks: Sequence[Chunk], tied: Sequence[Sequence[str]]) -> list[Chunk]:
    """Returns the chunks with every name of a tied group present; no data is copied.

    A receiver may hold a tied pair as two tensors (a packed output head beside the embedding), and an update made
    from `named_parameters()` carries only one of the names: without this the other would silently keep old values.

    Raises:
        WeightSyncError: the members of a tied group differ in value.
    """
    everything = {name: tensor for chunk in chunks for name, tensor in chunk.items()}
    filled = [dict(chunk) for chunk in chunks]
    problems = []
    for group in tied:
        present = [name for name in group if name in everything]
        if not present:
            continue
        source = everything[present[0]]
        problems += [
            f"{name} and {present[0]} are tied in the model but differ"
            for name in present[1:]
            if not torch.equal(everything[name], source)
        ]
        filled[-1].update({name: source for name in group if name not in everything})
    _refuse(problems)
    return filled


def _refuse(problems: list[str]) -> None:
    """Raises if there is a problem; called before any weight has changed."""
    if not problems:
        return
    listed = "; ".join(problems[:_LISTED_PROBLEMS])
    more = f"; and {len(problems) - _LISTED_PROBLEMS} more" if len(problems) > _LISTED_PROBLEMS else ""
    raise WeightSyncError(f"weight update refused, the old weights stay: {listed}{more}")
