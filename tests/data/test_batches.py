"""Batches: each row once per epoch, epochs run into each other, a cursor resumes exactly."""

import dataclasses
import json

import pytest

from openrlhf_ebft.data.batches import BatchPlan, DataCursor


def run(plan, epochs, cursor=None):
    """All batches of a run from a cursor on."""
    cursor = cursor or DataCursor()
    batches = []
    while True:
        batch, cursor = plan.next_batch(cursor, epochs)
        if not batch:
            return batches
        batches.append(batch)


@pytest.mark.parametrize(("rows", "sizes"), [(10, [10]), (20, [16, 4]), (30, [16, 14]), (32, [16, 16])])
def test_case_b15_small_data(rows, sizes):
    plan = BatchPlan(rows, 16, seed=0)
    batches = run(plan, epochs=1)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    assert plan.total_steps(1) == len(sizes)


def test_case_b13_epochs_run_into_each_other():
    plan = BatchPlan(1000, 128, seed=0)
    cursor = DataCursor()
    for _ in range(8):
        batch, cursor = plan.next_batch(cursor)
        assert len(batch) == 128
    assert cursor == DataCursor(epoch=1, offset=24)
    assert plan.next_batch(cursor)[0] == plan.epoch_order(1)[24:152]


def test_case_b47_schedule_is_as_long_as_the_run():
    plan = BatchPlan(1000, 128, seed=0)
    assert plan.total_steps(3) == 23
    assert plan.dropped_rows(3) == 56
    assert [len(batch) for batch in run(plan, epochs=3)] == [128] * 23


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 20])
def test_resuming_gives_the_rest_of_a_straight_run(stop):
    straight = run(BatchPlan(1000, 128, seed=5), epochs=3)
    cursor = DataCursor()
    plan = BatchPlan(1000, 128, seed=5)
    for _ in range(stop):
        _, cursor = plan.next_batch(cursor, 3)
    saved = json.dumps(dataclasses.asdict(cursor))
    resumed = run(BatchPlan(1000, 128, seed=5), 3, DataCursor(**json.loads(saved)))
    assert resumed == straight[stop:]


def test_each_row_once_per_epoch():
    plan = BatchPlan(50, 8, seed=1)
    rows = [row for batch in run(plan, epochs=4) for row in batch]
    assert len(rows) == 200
    for epoch in range(4):
        assert sorted(rows[50 * epoch : 50 * (epoch + 1)]) == list(range(50))


def test_order_depends_on_seed_and_epoch():
    plan = BatchPlan(100, 8, seed=1)
    first = list(plan.epoch_order(0))
    assert first != list(range(100))
    assert plan.epoch_order(1) != first
    assert plan.epoch_order(0) == first
    assert BatchPlan(100, 8, seed=2).epoch_order(0) != first
    assert BatchPlan(100, 8, seed=1, shuffle=False).epoch_order(3) == list(range(100))


def test_batch_larger_than_the_data_is_one_epoch():
    plan = BatchPlan(3, 8, seed=0)
    batches = run(plan, epochs=4)
    assert [sorted(batch) for batch in batches] == [[0, 1, 2]] * 4
    assert plan.total_steps(4) == 4


@pytest.mark.parametrize("epochs", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31])
def test_total_steps_counts_what_the_run_takes(rows, epochs):
    plan = BatchPlan(rows, 8, seed=0)
    taken = run(plan, epochs)
    assert len(taken) == plan.total_steps(epochs) >= 1
    assert sum(map(len, taken)) + plan.dropped_rows(epochs) == rows * epochs
    assert {row for batch in taken for row in batch} == set(range(rows))


def test_cursor_of_other_data_is_an_error():
    with pytest.raises(ValueError, match="offset 24 of 10 rows"):
        BatchPlan(10, 4, seed=0).next_batch(DataCursor(1, 24))


@pytest.mark.parametrize(("rows", "size"), [(0, 4), (4, 0)])
def test_nothing_to_batch_is_an_error(rows, size):
    with pytest.raises(ValueError, match="at least 1"):
        BatchPlan(rows, size, seed=0)
