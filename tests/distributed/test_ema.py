"""The moving average of the weights against one made by hand, under every way DeepSpeed holds parameters."""

import json

import pytest
import torch

from openrlhf_ebft.distributed.ema import WeightAverage
from tests.processes import run_ranks
from tests.tiny_models import tiny_llama

ONE_RANK = {"plain": {}, "bf16": {"dtype": "bfloat16"}}
TWO_RANKS = {
    f"ranks_zero{stage}": {"zero_stage": stage, "num_ranks": 2, "micro_batch_size": 2} for stage in (0, 2, 3)
} | {"ranks_bf16": {"dtype": "bfloat16", "zero_stage": 3, "num_ranks": 2, "micro_batch_size": 2}}
STEPS = 3


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ema")
    tiny_llama(folder / "model")
    run_ranks("tests.distributed.ema_rank", 1, str(folder), json.dumps(ONE_RANK))
    run_ranks("tests.distributed.ema_rank", 2, str(folder), json.dumps(TWO_RANKS))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in (*ONE_RANK, *TWO_RANKS)}


@pytest.mark.stack
@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_average_is_the_one_made_by_hand(records, name):
    """In bfloat16 the float32 average is rounded when it is put in place: 2^-9 of weights around 0.2 to 1."""
    record = records[name]
    assert record["first"] == 0.0
    for step in range(STEPS):
        assert record[f"average_{step}"] <= (4e-3 if "bf16" in name else 1e-6)
        assert record[f"moved_{step}"] > 1e-3
        assert record[f"score_moved_{step}"] > 1e-3


@pytest.mark.stack
@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_looking_at_the_average_leaves_the_training_as_it_was(records, name):
    record = records[name]
    for step in range(STEPS):
        assert record[f"restored_{step}"] == record[f"score_restored_{step}"] == 1.0
    assert record["like_plain"] == 0.0


@pytest.mark.stack
@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_a_resumed_run_has_the_same_average(records, name):
    assert records[name]["resumed_average"] == records[name]["resumed_weights"] == 0.0


def parameters(seed=0):
    torch.manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in (("a", (3, 5)), ("b", (2,)), ("c", (1,)))}


def averages(world_size, values):
    return [WeightAverage(values, 0.5, rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_files_of_another_number_of_ranks_are_read(tmp_path, world_size):
    for average in averages(world_size, parameters(seed=1)):
        average.saving(tmp_path)()
    now = parameters(seed=2)
    (single,) = averages(1, now)
    single.load(tmp_path)
    single.swap(use_average=True)
    for name, value in parameters(seed=1).items():
        assert torch.equal(now[name], value)
    back = tmp_path / "back"
    back.mkdir()
    single.swap(use_average=False)
    single.saving(back)()
    for average, first in zip(averages(world_size, now), averages(world_size, parameters(seed=1)), strict=True):
        average.load(back)
        for name, piece in first._average.items():
            assert torch.equal(average._average[name], piece)


def test_missing_files_and_other_parameters_are_named(tmp_path):
    (average,) = averages(1, parameters())
    with pytest.raises(RuntimeError, match=r"average-rank-0.safetensors is missing.*policy.ema_decay"):
        average.load(tmp_path)
    average.saving(tmp_path)()
    few = parameters()
    del few["b"]
    with pytest.raises(RuntimeError, match="averages other parameters"):
        averages(1, few)[0].load(tmp_path)


def test_no_update_while_the_average_is_in_use(tmp_path):
    (average,) = averages(1, parameters())
    average.swap(use_average=True)
    with pytest.raises(RuntimeError, match="in use"):
        average.update()
