"""The Python of docs/rad.md runs as it stands, in order, on tiny models."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from openrlhf_ebft.rad import CachedRewardModelValue
from tests.rad.conftest import configs, make_classifier, make_lm, make_tokenizer, save_classifier

PAGE = Path(__file__).parents[2] / "docs" / "rad.md"


def test_every_block_runs_and_steers(tmp_path):
    model, tokenizer = make_lm(configs()["llama"]), make_tokenizer()
    tokenizer.padding_side = "left"
    model.generation_config.pad_token_id = 1
    model.save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    names = {
        "model": model,
        "tokenizer": tokenizer,
        "prompts": ["w3 w4", "w5 w6 w7"],
        "reward_folder": save_classifier(tmp_path / "reward", configs()["gpt2"]),
        "kind_model": make_classifier(configs()["llama"]),
        "toxic_model": make_classifier(configs()["gpt2"], seed=5),
        "probe": torch.randn(32),
        "backbone": str(tmp_path / "backbone"),
        "texts": ["w3 w4 w5", "w6"],
        "labels": [0.2, 0.9],
        "output_dir": tmp_path / "trained",
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(block, names)
    assert names["rad"].scoring_path == "cached" and names["output"].size(0) == 2
    assert (tmp_path / "trained" / "model.safetensors").exists()

    prefix, logits = torch.tensor([[1, 3, 4], [5, 6, 7]]), torch.randn(2, 48)
    first = logits.topk(10).indices
    reward = CachedRewardModelValue(names["kind_model"])
    for name, k in (("both", 20), ("fudge", 40), ("args", 10), ("sasa", 48)):
        with torch.no_grad():
            out = names[name](prefix, logits)
        assert (out > float("-inf")).sum(dim=1).tolist() == [k, k], name
    from openrlhf_ebft.rad import StepContext

    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    want = logits.gather(1, first) + 1.5 * reward(StepContext(prefix, first, attention_mask=mask))
    torch.testing.assert_close(names["args"](prefix, logits).gather(1, first), want)
    torch.testing.assert_close(
        (names["sasa"](prefix, logits) - logits).sum(dim=1), torch.full((2,), 5.0), atol=1e-4, rtol=0
    )
