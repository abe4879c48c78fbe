"""The picture of a rollout tree, from a real configuration, tokenizer and model."""

import json

import pytest

from openrlhf_ebft.cli.main import main
from tests.tiny_models import tiny_llama, tiny_tokenizer


@pytest.fixture
def config(tmp_path):
    tiny_llama(tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    texts = ["abcdefghijklmnopqrstuvwxyz"[start:] + "<b>" * 9 for start in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: t\nmodel: {{path: {tmp_path / 'model'}, dtype: float32}}\n"
        f"data: {{mode: strided, path: {tmp_path / 'rows.jsonl'}, text_column: text, generate_max_len: 4,"
        " heldout_fraction: 0}\nevaluation: {max_examples: 0}\n"
    )
    return str(path)


@pytest.mark.parametrize("name", ["tree.html", "tree.png"])
def test_pictures(config, tmp_path, capsys, name):
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    out = tmp_path / name
    assert main(["show-tree", config, "--out", str(out), "--tokens", "24", "--samples", "2"]) == 0
    assert "2 anchors, 4 branches" in capsys.readouterr().out
    if name.endswith("html"):
        text = out.read_text(encoding="utf-8")
        assert text.count("<td>anchor 8, completion") == text.count("<td>anchor 16, completion") == 2
        assert text.count('class="token anchor"') == 2
    else:
        assert out.read_bytes().startswith(b"\x89PNG")


def test_a_late_first_anchor_is_drawn_and_text_of_tokens_is_escaped(config, tmp_path):
    """Without --tokens the picture goes as far as the first anchor needs: 36 and a window of 4."""
    out = tmp_path / "tree.html"
    assert main(["show-tree", config, "--out", str(out), "--samples", "1", "--data.context_length", "36"]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.count("<td>anchor 36, completion") == 1 and text.count('class="token anchor"') == 1
    assert "&lt;unk&gt;" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "tree.gif", "--model.path", "./no-model-is-read"], "must end in .html or .png"),
        (["--out", "none/tree.png", "--model.path", "./no-model-is-read"], "there is no folder none"),
        (["--out", "tree.html", "--tokens", "10"], "--tokens 10: the first anchor and its ground truth need 12"),
        (["--out", "tree.html", "--tokens", "50", "--samples", "9"], "too large to draw: at most 200"),
    ],
)
def test_wrong_arguments(config, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show-tree", config, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("tree.*"))
