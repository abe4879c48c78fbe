import pytest

MINIMAL = "name: run\nmodel:\n  path: some/model\ndata:\n  path: rows.jsonl\n"


@pytest.fixture
def write_config(tmp_path):
    """Writes a configuration file and returns its path."""

    def write(text=MINIMAL, name="run.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
