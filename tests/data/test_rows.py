"""Reading: every kind of file gives the same rows, and every fault is named with file and row."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.sources import read_rows

ROWS = [{"prompt": 'a, "b"', "ground_truth": "é\nx"}, {"prompt": "c", "ground_truth": "d 😀"}]


def read(path, strict=True, split="train"):
    report = DataReport(strict=strict)
    return [dict(row.values) for row in read_rows(str(path), split, report)], report


def places(path):
    return [row.place for row in read_rows(str(path), "train", DataReport(strict=True))]


def test_all_kinds_of_files_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    (tmp_path / "a.csv").write_text('prompt,ground_truth\n"a, ""b""","é\nx"\nc,d 😀\n', encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.PARQUET")
    for path in sorted(tmp_path.iterdir()):
        rows, report = read(path)
        assert rows == ROWS, path
        assert report.rows_read == 2


def test_byte_order_mark_crlf_and_blank_lines_are_no_content(tmp_path):
    lines = b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in ROWS) + b"\r\n"
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,ground_truth\r\n\r\nx,y\r\n")
    assert read(tmp_path / "a.jsonl")[0] == ROWS
    assert read(tmp_path / "a.csv")[0] == [{"prompt": "x", "ground_truth": "y"}]


def test_places_are_lines_where_rows_are_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"p": 1}\n\n{"p": 2}\n')
    (tmp_path / "a.csv").write_text('p,q\n"1\n1",x\n2,y\n')
    (tmp_path / "a.json").write_text('[{"p": 1}, {"p": 2}]')
    assert places(tmp_path / "a.jsonl") == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:3"]
    assert places(tmp_path / "a.csv") == [f"{tmp_path}/a.csv:2 (row 1)", f"{tmp_path}/a.csv:4 (row 2)"]
    assert places(tmp_path / "a.json") == [f"{tmp_path}/a.json, row 1", f"{tmp_path}/a.json, row 2"]


def test_a_key_that_stands_twice_in_a_row_is_a_fault_of_that_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"p": 1}\n{"p": 2, "q": {"r": 1, "r": 2}}\n')
    rows, report = read(tmp_path / "a.jsonl", strict=False)
    assert rows == [{"p": 1}]
    assert report.examples["broken JSON"] == [f"{tmp_path}/a.jsonl:2: broken JSON: key 'r' stands twice"]


def test_what_a_folder_holds_beside_its_data_files_is_noted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"p": 1}\n')
    assert read(tmp_path)[1].notes == []
    (tmp_path / "b.jsonl.gz").write_text("x")
    (tmp_path / "more").mkdir()
    assert "b.jsonl.gz, more (rows come from .jsonl" in read(tmp_path)[1].notes[0]


def test_folder_reads_its_data_files_by_name(tmp_path):
    for name, value in (("b.jsonl", 2), ("a.jsonl", 1), ("c.json", 3)):
        (tmp_path / name).write_text(json.dumps({"p": value}) + "\n")
    (tmp_path / "README.md").write_text("no data")
    assert [row["p"] for row in read(tmp_path)[0]] == [1, 2, 3]


GOOD = b'{"p": "x"}\n'


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"p": "x"\n', "broken JSON", "broken JSON: "),
        (b"x\n", "broken JSON", "broken JSON: "),
        (b'{"p": "\xff"}\n', "not UTF-8", "byte 0xff at 7"),
        (b"[1]\n", "not an object", "but is a list"),
        (b"3\n", "not an object", "but is a int"),
        (b"[" * 100_000 + b"\n", "broken JSON", "broken JSON: "),
    ],
)
def test_faulty_lines(tmp_path, line, reason, detail):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert detail in str(caught.value)
    rows, report = read(path, strict=False)
    assert len(rows) == 2
    assert report.rows_read == 3
    assert report.skipped == {reason: 1}
    assert report.examples[reason][0].startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("text", "detail"),
    [("p,q\n1,2\n1\n3,4\n", "1 fields, but the header names 2"), ('p,q\n1,2\n1,"2"x\n3,4\n', "broken CSV: ")],
)
def test_faulty_records(tmp_path, text, detail):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"a.csv:3 \\(row 2\\): .*{detail}"):
        read(path)
    rows, report = read(path, strict=False)
    assert rows == [{"p": "1", "q": "2"}, {"p": "3", "q": "4"}]
    assert report.skipped == {"broken CSV": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"p": 1', "broken JSON"),
        ("a.json", b"[1, 2", "broken JSON"),
        ("a.json", b"3", "must hold a list of objects, but holds a int"),
        ("a.json", b'["\xff"]', "not UTF-8 text: byte 0xff at 2"),
        ("a.csv", b"", "no header line"),
        ("a.csv", b"p,p\n1,2\n", "column 'p' stands twice"),
        ("a.parquet", b"nonsense", "cannot be read as Parquet"),
        ("a.txt", b"x", "files must end in one of .jsonl .json .csv .parquet"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_paths_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"data.path = none.jsonl: no such file or folder in {tmp_path}"):
        read("none.jsonl")
    for path in (tmp_path / "none.jsonl", tmp_path / "none"):
        with pytest.raises(DataError, match="no such file or folder"):
            read(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no file that ends in one of"):
        read(tmp_path / "empty")


def test_hub_name_that_cannot_be_loaded_is_named():
    with pytest.raises(DataError, match=r"data\.path = nobody/nothing: .*data\.split = test"):
        read("nobody/nothing", split="test")


def test_saved_dataset_folder(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "d"))
    rows.save_to_disk(str(tmp_path / "s"))
    assert read(tmp_path / "d", split="test")[0] == ROWS[1:]
    assert read(tmp_path / "s")[0] == ROWS
    with pytest.raises(DataError, match="has the splits train, test"):
        read(tmp_path / "d", split="validation")
    (file,) = (tmp_path / "s").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"data\.path = \S+: cannot be read as a saved data set: "):
        read(tmp_path / "s")


def test_folder_of_parquet_parts_loads_like_a_hub_dataset(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "part-0.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[1:]), tmp_path / "part-1.parquet")
    assert read(tmp_path)[0] == ROWS
