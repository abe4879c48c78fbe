"""One head node for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import Cluster, new_cluster
from tests.trainer import runs


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A head with four CPUs and token authentication."""
    made = new_cluster()
    try:
        made.start_head(cpus=4)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="package")
def work(cluster: Cluster) -> Path:
    """A working directory for jobs: model, data and, written by each test, configurations."""
    folder = cluster.folder / "work"
    folder.mkdir()
    runs.write_inputs(folder)
    return folder
