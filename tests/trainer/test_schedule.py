"""Which rows each step of a run trains on (cases B15 and B47), through the run's own schedule."""

from dataclasses import replace

import pytest

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.data.batches import BatchPlan
from openrlhf_ebft.trainer.run import make_schedule
from openrlhf_ebft.trainer.state import TrainerState
from tests.actors.test_placement import make_config


def run_steps(rows, *, policy, batch=16):
    """Batches of a whole run, (warm-up, EBFT)."""
    plan = BatchPlan(rows, batch, seed=1)
    schedule = make_schedule(make_config(policy={"prompts_per_step": batch, **policy}), plan)
    state, batches = TrainerState(), []
    while state.step < schedule.total:
        numbers, cursor = schedule.next_rows(plan, state)
        state = replace(state, step=state.step + 1, cursor=cursor)
        batches.append(numbers)
    return batches[: schedule.sft_steps], batches[schedule.sft_steps :]


@pytest.mark.parametrize("warmup", [0, 1, 3, 4])
@pytest.mark.parametrize(("rows", "sizes"), [(10, [10]), (20, [16, 4]), (30, [16, 14]), (32, [16, 16])])
def test_one_epoch_shows_every_row_once_whatever_the_warm_up_used(rows, sizes, warmup):
    first, ebft = run_steps(rows, policy={"sft_warmup_steps": warmup})
    assert [len(batch) for batch in ebft] == sizes
    assert sorted(row for batch in ebft for row in batch) == list(range(rows))
    assert [len(batch) for batch in first] == [min(rows, 16)] * warmup


@pytest.mark.parametrize("warmup", [0, 5])
def test_three_epochs_are_23_full_updates(warmup):
    """1,000 rows in batches of 128 over 3 epochs, the rest of an epoch carried over its edge."""
    _, ebft = run_steps(1000, policy={"sft_warmup_steps": warmup, "epochs": 3}, batch=128)
    assert [len(batch) for batch in ebft] == [128] * 23
    rows = [row for batch in ebft for row in batch]
    for epoch in range(2):
        assert sorted(rows[1000 * epoch : 1000 * (epoch + 1)]) == list(range(1000))


def test_a_number_of_steps_goes_on_where_the_warm_up_ended():
    first, ebft = run_steps(20, policy={"sft_warmup_steps": 1, "max_steps": 4})
    assert [len(batch) for batch in ebft] == [16] * 4
    assert sorted(first[0] + ebft[0][:4]) == list(range(20))


def test_a_run_without_steps_is_refused():
    plan = BatchPlan(8, 4, seed=0)
    config = make_config()
    config.policy.max_steps = 0
    with pytest.raises(UserError, match=r"policy.max_steps = 0 and policy.sft_warmup_steps = 0"):
        make_schedule(config, plan)
