"""Tiny runs of the whole stack for tests: a random model, a few rows, real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.processes import ROOT
from tests.tiny_models import tiny_llama, tiny_tokenizer

_TEXT = "the cat sat on a mat and then ran off to see one more dog near an old red hut by sea"
WORDS = _TEXT.split()


def write_inputs(folder: Path, rows: int = 40) -> None:
    """A tiny model with its tokenizer in `model`, and prompt/ground-truth pairs in `pairs.jsonl`."""
    tiny_llama(folder / "model")
    tiny_tokenizer(folder / "model")
    with (folder / "pairs.jsonl").open("w") as file:
        for i in range(rows):
            words = [WORDS[(i * 7 + k * (1 + i % 5)) % len(WORDS)] for k in range(9)]
            file.write(json.dumps({"prompt": " ".join(words[:4]), "ground_truth": " " + " ".join(words[4:])}) + "\n")


def write_infinite_token(folder: Path, pairs: Path) -> list[dict[str, str]]:
    """A model `bad` in which the embedding of `7` is infinite, and `pairs`: those of `write_inputs`, every seventh with
    a `7`; returns them."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for row in rows[::7]:
        row["ground_truth"] += " 7"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_llama(folder / "bad", tied=False)
    tokenizer = tiny_tokenizer(folder / "bad")
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("7")["input_ids"][0]] = torch.inf
    model.save_pretrained(folder / "bad")
    return rows


def base_config(folder: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "seed": 3,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "pairs.jsonl"), "heldout_fraction": 0.2},
        "rollout": {"max_new_tokens": 12, "kv_cache_gib": 0.25, "samples_per_prompt": 3},
        "policy": {"prompts_per_step": 4, "micro_batch_size": 2, "max_steps": 3, "sft_warmup_steps": 2},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"max_examples": 4},
        "placement": {"threads_per_actor": 1},
        "logging": {"root": str(folder / "runs"), "progress": False},
    }


def write_config(folder: Path, name: str, **sections: Any) -> Path:
    """Writes the base configuration with `sections` merged in; the run is called `name`."""
    config = base_config(folder) | {"name": name}
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def environment() -> dict[str, str]:
    """DeepSpeed compiles an extension with ninja, which lies beside the interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts `openrlhf-ebft ARGUMENTS` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "openrlhf_ebft.cli.main", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str, timeout_s: float = 280) -> tuple[int, str]:
    """Runs a command to its end; returns (exit code, output)."""
    process = start(*arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise AssertionError(f"no end within {timeout_s} s:\n{process.communicate()[0][-6000:]}") from error
    return process.returncode, output


def read_metrics(folder: Path, name: str, *, timings: bool = False) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl; NaN or Infinity as bare words would raise."""

    def refuse(word: str) -> None:
        raise AssertionError(f"metrics.jsonl holds {word}")

    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{k: v for k, v in record.items() if timings or not k.startswith("time/")} for record in records]
