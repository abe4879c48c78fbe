"""Copies of what a checkpoint holds, and the thread that writes them."""

import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from openrlhf_ebft.distributed.background_write import BackgroundWrite, snapshot


def content():
    flat = torch.arange(12.0)
    return OrderedDict(
        whole=flat,
        views=[flat[2:6], flat.view(3, 4).t()],
        weight=nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
        settings={"lr": 0.1, "betas": (0.9, 0.95), 3: None},
        schedule={"steps": [1, 2]},
    )


def test_a_copy_equals_what_was_there_and_no_later_step_reaches_it(tmp_path):
    state = content()
    copied = snapshot(state)
    size = size_of_file(state, tmp_path)
    for tensor in (state["whole"], state["weight"].data):
        tensor.fill_(-1)
    state["schedule"]["steps"].append(3)
    expected = content()
    assert type(copied) is OrderedDict and list(copied) == list(expected)
    assert copied["whole"].equal(expected["whole"])
    for ours, theirs in zip(copied["views"], expected["views"], strict=True):
        assert ours.equal(theirs) and ours.stride() == theirs.stride()
    assert isinstance(copied["weight"], nn.Parameter) and not copied["weight"].requires_grad
    assert copied["weight"].equal(expected["weight"]) and copied["weight"].dtype == torch.bfloat16
    assert copied["settings"] == expected["settings"] and copied["schedule"] == {"steps": [1, 2]}
    assert size_of_file(copied, tmp_path) == size, "shared memory is shared"
    copied["whole"][3] = 7.0
    assert copied["views"][0][1] == 7.0 and copied["views"][1][3, 0] == 7.0


def size_of_file(state, folder):
    torch.save(state, folder / "state.pt")
    return (folder / "state.pt").stat().st_size


def test_files_are_written_in_order_beside_other_work(tmp_path):
    go, order = threading.Event(), []

    def first():
        assert go.wait(10)
        order.append(1)

    write = BackgroundWrite([first, lambda: order.append(2)])
    assert not write.is_done() and order == []
    go.set()
    wait_for(write)
    assert order == [1, 2]


def test_the_error_of_a_write_is_raised_and_nothing_more_is_written(tmp_path):
    write = BackgroundWrite([lambda: Path("/nowhere/file").write_bytes(b""), lambda: (tmp_path / "next").touch()])
    with pytest.raises(FileNotFoundError, match="/nowhere/file"):
        wait_for(write)
    with pytest.raises(FileNotFoundError):
        write.is_done()
    assert not (tmp_path / "next").exists()


def wait_for(write):
    tick = threading.Event()
    for _ in range(1000):
        if write.is_done():
            return
        tick.wait(0.01)
    raise AssertionError("not written within 10 s")
