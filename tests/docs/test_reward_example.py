"""examples/reward_functions.py runs from start to picture, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import tiny_byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[2]


def test_example_scores_five_completions_and_draws_them(tmp_path):
    tiny_llama(tmp_path / "model", vocab=512)
    tiny_byte_tokenizer(tmp_path / "model")
    picture = tmp_path / "rewards.png"
    command = [
        sys.executable,
        "examples/reward_functions.py",
        "--model",
        str(tmp_path / "model"),
        "--output",
        str(picture),
    ]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert sum("." in line[:8] for line in lines) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")
