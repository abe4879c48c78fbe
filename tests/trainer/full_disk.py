"""python -m tests.trainer.full_disk FOLDER POLICY: saves checkpoints on a file system of 1 MiB until it is full."""

import sys
from pathlib import Path

import pytest

from openrlhf_ebft.trainer.checkpoints import CheckpointError, CheckpointStore
from tests.trainer.test_resume import make_store, save


def fill(folder: Path) -> None:
    (folder / "rank-0.bin").write_bytes(b"x" * 2**21)


def failure_of(store: CheckpointStore, said: list[str], policy: str) -> str:
    """What a save that cannot succeed says, by exception or by a warning."""
    try:
        save(store, 2, fill)
    except CheckpointError as error:
        assert policy == "error"
        return str(error)
    assert policy == "warn"
    return said[-1]


def main(folder: Path, policy: str) -> None:
    said: list[str] = []
    store = make_store(folder, said, on_full_disk=policy)
    save(store, 1)
    in_the_middle = failure_of(store, said, policy)
    with pytest.raises(OSError, match="No space left"), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    before_writing = failure_of(store, said, policy)
    assert "No space left on device" in in_the_middle, in_the_middle
    assert "it needs about 0.0 MiB, and" in before_writing, before_writing
    for text in (in_the_middle, before_writing):
        assert "step-2 could not be written" in text and "MiB free" in text and "still" in text, text
    checkpoint = store.newest()
    assert checkpoint is not None and checkpoint.state.step == 1
    assert sorted(path.name for path in folder.iterdir()) == ["ballast", "step-1"], "the attempt must leave nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
