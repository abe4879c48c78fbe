"""What may differ between the configuration of a checkpoint and that of the run that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.trainer.manifests import Manifest, library_versions

_FREE_SECTIONS = ("placement", "recovery", "logging")
_FREE_KEYS = (
    "name",
    "checkpoint.background",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "checkpoint.best_metric",
    "checkpoint.best_direction",
    "checkpoint.on_interrupt",
    "checkpoint.on_full_disk",
    "evaluation.show_samples",
    "rollout.max_retries",
    "rollout.timeout_s",
    "features.timeout_s",
    "policy.timeout_s",
)
"""Keys that say where and how safely a run goes, not what it computes."""

_FIXED_KEYS = {
    "model.path": "the weights in the checkpoint are of another model",
    "model.dtype": "optimizer states are laid out by precision",
    "policy.num_ranks": "DeepSpeed's files are cut by the number of ranks",
    "deepspeed.zero_stage": "DeepSpeed's files are cut by the ZeRO stage",
    "deepspeed.offload_optimizer": "DeepSpeed keeps offloaded optimizer states in another form",
    "lora.rank": "adapters in the checkpoint have another shape",
}


def check_changes(saved: Manifest, config: EBFTConfig, *, allow: bool) -> list[str]:
    """Compares a checkpoint's configuration and libraries with the present ones; returns notes for the user.

    Args:
        saved: manifest of the checkpoint.
        config: configuration of the run that goes on.
        allow: differences that change what the run computes are allowed.

    Raises:
        UserError: lists differences that are not allowed, or that no checkpoint can follow.
    """
    changes = dict(_differences(saved.config, config.model_dump(mode="json")))
    lines = {key: f"  {key}: {old} in the checkpoint, now {new}" for key, (old, new) in changes.items()}
    fixed = [f"{lines[key]} ({_FIXED_KEYS[key]})" for key in changes if key in _FIXED_KEYS]
    serious = [] if allow else [line for key, line in lines.items() if not _is_free(key) and key not in _FIXED_KEYS]
    if fixed:
        raise UserError("\n".join(["the checkpoint cannot be used with these changes:", *fixed, *serious]))
    if serious:
        hint = "put them back, or add --allow-config-change to go on with the new values:"
        raise UserError("\n".join([f"the configuration differs from the checkpoint's; {hint}", *serious]))
    notes = [f"changed:{line.removeprefix(' ')}" for line in lines.values()]
    for name, (old, new) in dict(_differences(saved.libraries, library_versions())).items():
        notes.append(f"warning: the checkpoint was written with {name} {old}, this is {new}: results may differ")
    return notes


def _is_free(key: str) -> bool:
    return key in _FREE_KEYS or key.partition(".")[0] in _FREE_SECTIONS


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields (key, (old value, new value)) for every leaf that differs; a missing one is None."""
    for name in dict.fromkeys([*old, *new]):
        first, second = old.get(name), new.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from _differences(first, second, f"{prefix}{name}.")
        elif first != second:
            yield f"{prefix}{name}", (first, second)
