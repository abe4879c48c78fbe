"""Finds what `data.path` means: a file, a folder of files, or a dataset of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_ebft.data.errors import DataError
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.rows import Reader, Row, read_csv, read_json, read_jsonl


def read_rows(path: str, split: str, report: DataReport) -> Iterator[Row]:
    """Yields every row of `path`: files in the order of their names, rows in the order of the file.

    A hub dataset is written `owner/name`, or `owner/name:subset` when it has subsets; `split` chooses its split.

    Raises:
        DataError: nothing is found there, or a file of it cannot be read; in strict mode also a broken row.
    """
    local = Path(path).expanduser()
    if any((local / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        yield from _read_saved_dataset(local, split, report)
    elif local.exists():
        for file in _list_files(local, report):
            yield from _READERS[file.suffix.lower()](file, report)
    elif local.suffix.lower() in _READERS or path.startswith((".", "/", "~")):
        # Relative paths of a Ray job lie in Ray's copy of the working directory: say where was looked.
        where = "" if local.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"data.path = {path}: no such file or folder{where}")
    else:
        yield from _read_hub_dataset(path, split, report)


def _list_files(path: Path, report: DataReport) -> list[Path]:
    known = " ".join(ROW_SUFFIXES)
    if path.is_file():
        if path.suffix.lower() not in _READERS:
            raise DataError(f"data.path = {path}: files must end in one of {known}")
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in _READERS]
    if not files:
        raise DataError(f"data.path = {path}: this folder holds no file that ends in one of {known}")
    report.note_unread(path, [entry for entry in entries if entry not in files], f"rows come from {known}")
    return files


def _read_parquet(path: Path, report: DataReport) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    report.rows_read += 1
                    yield Row(f"{path}, row {number}", values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet after row {number}: {error}") from None


def _read_saved_dataset(path: Path, split: str, report: DataReport) -> Iterator[Row]:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"data.path = {path}: cannot be read as a saved data set: {error}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(f"data.split = {split}: {path} has the splits {', '.join(dataset)}")
        dataset = dataset[split]
    yield from _dataset_rows(str(path), dataset, report)


def _read_hub_dataset(path: str, split: str, report: DataReport) -> Iterator[Row]:
    import datasets

    name, _, subset = path.partition(":")
    try:
        dataset = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.path = {path}: no such file or folder, and as a hub dataset (data.split = {split}) "
            f"it could not be loaded: {error}"
        ) from None
    yield from _dataset_rows(path, dataset, report)


def _dataset_rows(name: str, dataset: Any, report: DataReport) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        report.rows_read += 1
        yield Row(f"{name}, row {number}", values)


_READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": _read_parquet,
}
ROW_SUFFIXES = tuple(_READERS)
"""Endings of the files that hold rows."""
