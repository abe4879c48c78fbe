"""Whole runs over chats of several assistant turns: on the data's history and on the policy's own."""

import json

import pytest

from tests.data.test_turns import CLOSED
from tests.trainer import runs

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats")
    runs.write_inputs(path)
    (path / "template.jinja").write_text(CLOSED)
    with (path / "chats.jsonl").open("w") as file:
        for row in range(24):
            words = [runs.WORDS[(row * 7 + k * (1 + row % 5)) % len(runs.WORDS)] for k in range(12)]
            chat = []
            for turn in range(1 + row % 3):
                chat += [
                    {"role": "user", "content": " ".join(words[4 * turn : 4 * turn + 2])},
                    {"role": "assistant", "content": " ".join(words[4 * turn + 2 : 4 * turn + 4])},
                ]
            file.write(json.dumps({"chat": chat}) + "\n")
    return path


def train(folder, name, **data):
    config = runs.write_config(
        folder,
        name,
        data={
            "path": str(folder / "chats.jsonl"),
            "messages_column": "chat",
            "chat_template": str(folder / "template.jinja"),
            "turns": "all",
            **data,
        },
        rollout={"engine": "transformers", "max_new_tokens": 8},
        policy={"max_steps": 2, "sft_warmup_steps": 1},
        evaluation={"max_examples": 3, "show_samples": 2},
    )
    code, output = runs.run("train", str(config))
    assert code == 0, output
    for shown in ("prompt (end)", "ground truth", "cross-entropy of the ground truth"):
        assert shown in output
    return runs.read_metrics(folder, name)


def test_both_histories(folder):
    """The warm-up trains on the data's chats in both; what is sampled behind them differs from the second turn on."""
    given = train(folder, "given")
    own = train(folder, "own", history="own")
    for records in (given, own):
        assert [record["phase"] for record in records] == ["evaluation", "sft", "ebft", "ebft", "evaluation"]
        for record in records[2:4]:
            assert record["applied"] == 1.0
            assert record["sampler_mismatch"] < 1e-3, "sampler and trainer must agree about the sampled tokens"
            assert 0 < record["reward/cfm_unbiased"] < 2
    assert own[1] == given[1]
    assert own[0]["ce"] != given[0]["ce"]
    saved = json.loads((folder / "runs" / "own" / "evaluation-before.json").read_text())
    names = [rollout["example_id"].partition("/")[2] for rollout in saved["rollouts"]]
    assert names == sorted(names) and names[:3] == ["turn-0"] * 3
    assert "turn-1" in names, "a held-out chat has a second turn"
    assert len(saved["examples"]) == len(names)
