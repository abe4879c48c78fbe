"""The sentiment example: its configuration loads, and its data comes out of an archive laid out like the real one."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path

import pytest

from openrlhf_ebft.cli.train_reward import read_examples
from openrlhf_ebft.config.reward_training import load_reward_config
from tests.rad.conftest import configs, make_lm, make_tokenizer

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("rad_sentiment", ROOT / "benchmarks" / "rad_sentiment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tar_of(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_data_and_configuration(tmp_path, capsys):
    script = load_script()
    lines = "".join(f"{i}\t{(i % 9) - 4}\tw{i % 40 + 3} w5  with a\ttab {i}\r\n" for i in range(60))
    inner = tar_of(script.SENTENCES, lines.encode())
    archive = tmp_path / "vaderSentiment-2.5.tar.gz"
    archive.write_bytes(tar_of(f"vaderSentiment-2.5/{script.RATINGS}", inner))
    rows = script.read_sentences(str(archive))
    assert len(rows) == 60 and rows[1] == ("w4 w5  with a\ttab 1", -3.0)

    make_lm(configs()["llama"]).save_pretrained(tmp_path / "lm")
    make_tokenizer().save_pretrained(tmp_path / "lm")
    script.prepare(str(archive), str(tmp_path / "lm"), str(tmp_path / "prepared"), layers=1)
    assert json.loads((tmp_path / "prepared" / "backbone" / "config.json").read_text())["num_hidden_layers"] == 1
    config = load_reward_config(
        ROOT / "examples" / "rad_sentiment.yaml",
        [f"--data.{part}_path={tmp_path}/prepared/{part}.jsonl" for part in ("train", "held_out")],
    )
    train, held_out = read_examples(config.data)
    assert len(train[0]) + len(held_out[0]) == 60 and len(held_out[0]) >= 1
    assert not set(train[0]) & set(held_out[0])
    assert min(train[1]) == 0 and max(train[1]) == 1
    with pytest.raises(ValueError, match="holds no additional_resources"):
        (tmp_path / "other.tar.gz").write_bytes(inner)
        script.read_sentences(str(tmp_path / "other.tar.gz"))


def test_prompts_are_a_hundred_different_ones():
    assert len(set(load_script().prompts())) == 100
