"""Raw documents: the text column of data rows, or text files themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openrlhf_ebft.config.sections import DataConfig
from openrlhf_ebft.data.errors import DataError, RowFault
from openrlhf_ebft.data.examples import row_text
from openrlhf_ebft.data.report import DataReport
from openrlhf_ebft.data.rows import Row
from openrlhf_ebft.data.sources import ROW_SUFFIXES, read_rows

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


def read_documents(config: DataConfig, column: str, report: DataReport) -> Iterator[tuple[Row, str]]:
    """Yields (row, text) of every document of `config.path`.

    A text file, or a folder with text files below it, gives one document a file, in the order of the paths; anything
    else is read as rows, whose `column` holds the text.

    Raises:
        DataError: nothing is found, or, in strict mode, the first faulty row or file.
    """
    path = Path(config.path).expanduser()
    files = _text_files(path, report)
    rows = _file_rows(files, column, report) if files else read_rows(config.path, config.split, report)
    for row in rows:
        try:
            text = row_text(row, column, "document")
        except RowFault as fault:
            report.fault(row.place, fault.reason, str(fault))
        else:
            yield row, text


def _text_files(path: Path, report: DataReport) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix.lower() in TEXT_SUFFIXES else []
    if not path.is_dir():
        return []
    found = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in found if file.suffix.lower() in TEXT_SUFFIXES]
    if files:
        rows = [file for file in found if file.suffix.lower() in ROW_SUFFIXES]
        report.note_unread(path, rows, f"a folder with {' '.join(TEXT_SUFFIXES)} files is read as text alone")
    return files


def _file_rows(files: list[Path], column: str, report: DataReport) -> Iterator[Row]:
    for file in files:
        report.rows_read += 1
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            report.fault(str(file), "not UTF-8", f"not UTF-8 text: byte {error.object[error.start]:#04x}")
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from None
        else:
            yield Row(str(file), {column: text})
