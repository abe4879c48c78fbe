"""The preparing commands: what they write, that they can be repeated, and what they say to wrong input."""

import json

import pytest

from openrlhf_ebft.cli.main import main


def test_prepare_data_writes_rows_that_training_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prepare-data", "stdlib", "--out", "new/pairs.jsonl"]) == 0
    assert "pairs in new/pairs.jsonl" in capsys.readouterr().out
    first = json.loads((tmp_path / "new" / "pairs.jsonl").open(encoding="utf-8").readline())
    assert set(first) == {"prompt", "ground_truth", "source"}


def test_prepare_data_writes_whole_modules(tmp_path, capsys):
    out = tmp_path / "modules.jsonl"
    assert main(["prepare-data", "stdlib-modules", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.open(encoding="utf-8")]
    assert f"{len(rows)} documents in" in capsys.readouterr().out
    assert len(rows) > 300 and all(set(row) == {"text", "source"} and row["text"].strip() for row in rows)
    (dataclasses,) = (row for row in rows if row["source"] == "dataclasses")
    assert "def asdict(" in dataclasses["text"]


def test_prepared_model_is_kept(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["prepare-model", "smollm2-135m", "--out", str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.gguf", "none.gguf: No such file"),
        ("a_file", "is neither a .gguf file nor a hub name"),
        ("nobody/nothing", "not found as a hub model"),
    ],
)
def test_sources_that_are_none(tmp_path, monkeypatch, capsys, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("x")
    assert main(["prepare-model", source, "--out", "out"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_other_content_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["prepare-model", "smollm2-135m", "--out", str(tmp_path)]) == 2
    assert "exists and is no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: 0: must be a whole number of at least 1"),
        (["--temperature", "warm"], "--temperature: warm: must be a finite number of at least 0"),
        (["--top-p", "2"], "--top-p: 2: must be a number above 0 and at most 1"),
    ],
)
def test_generate_refuses_wrong_numbers(capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        main(["generate", "model", "prompt", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_generate_needs_a_prompt_and_a_model(tmp_path, capsys):
    assert main(["generate", str(tmp_path), " "]) == 2
    assert "PROMPT is empty" in capsys.readouterr().err
    for model, message in ((tmp_path, "holds no config.json"), ("runs/misspelt/model", "no such folder")):
        assert main(["generate", str(model), "x"]) == 2
        assert message in capsys.readouterr().err
