"""Weight sync over the real actors: engines follow the trainer; a failed update is an error and can be repeated."""

import os
import signal

import pytest
import ray
import torch

from openrlhf_ebft.actors.cluster import connect, start_actors
from openrlhf_ebft.actors.waiting import ActorError
from openrlhf_ebft.actors.weight_sync import choose_transfer
from openrlhf_ebft.config.sections import EBFTConfig, RolloutConfig
from openrlhf_ebft.core.experience import SamplingSettings
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import without_advantages
from tests.trainer import runs
from tests.trees import make_reference

SEQUENCE = [5, 9, 12, 7, 33, 21]


@pytest.mark.parametrize(
    ("settings", "with_gpus", "expected"),
    [
        ({}, False, "object_store"),
        ({}, True, "nccl"),
        ({"weight_transfer": "ipc"}, True, "ipc"),
        ({"weight_transfer": "object_store"}, True, "object_store"),
        ({"engine": "transformers"}, True, "object_store"),
    ],
)
def test_transfer_follows_the_hardware_unless_named(settings, with_gpus, expected):
    assert choose_transfer(RolloutConfig(**settings), with_gpus=with_gpus) == expected


def test_adapters_alone_go_through_the_object_store():
    assert choose_transfer(RolloutConfig(), with_gpus=True, adapters_alone=True) == "object_store"


@pytest.fixture(scope="module")
def actors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync")
    runs.write_inputs(folder)
    config = EBFTConfig(**runs.base_config(folder))
    sampling = SamplingSettings(temperature=0.6, top_p=1.0, top_k=0, stop_token_ids=(1,))
    connect(config)
    try:
        yield start_actors(
            config, sampling=sampling, special_ids=[0, 1, 2], max_model_len=32, total_steps=4, say=lambda text: None
        )
    finally:
        ray.shutdown()


def sft_step(actors):
    items = [without_advantages(RolloutTree.without_branches(make_reference(8, [3], seed=seed))) for seed in (1, 2)]
    actors.trainer.train_step(items, "sft")


def trainer_scores(actors, size):
    """Log-probs of the whole sequence under the trainer's weights, through its own scoring."""
    reference = make_reference(size, [1])
    reference = type(reference)(**{**vars(reference), "token_ids": torch.tensor(SEQUENCE)})
    return -actors.trainer.score([RolloutTree.without_branches(reference)])[0].nats


@pytest.mark.stack
def test_engines_follow_the_trainer_only_after_a_sync(actors):
    for _ in range(2):
        sft_step(actors)
    ours = trainer_scores(actors, len(SEQUENCE))
    (stale,) = actors.rollout.score([SEQUENCE])
    assert abs(sum(stale[0]) - ours) > 0.05, "without the sync the engine must still hold the old weights"
    assert actors.weights.push() == 2
    (fresh,) = actors.rollout.score([SEQUENCE])
    assert sum(fresh[0]) == pytest.approx(ours, abs=1e-3)


@pytest.mark.stack
def test_a_refused_update_raises_with_the_engines_words_and_can_be_repeated(actors):
    sft_step(actors)
    update = actors.trainer.export_update()
    announced = tuple(spec for spec in update.manifest if spec.name != "model.norm.weight")
    lame = type(update)(update.version, announced, update.chunks)
    with pytest.raises(ActorError, match=r"weight sync: rollout engine 0 failed: .*missing: model.norm.weight"):
        actors.rollout.update_weights(lame)
    (before,) = actors.rollout.score([SEQUENCE])
    assert actors.weights.push() == 3
    (after,) = actors.rollout.score([SEQUENCE])
    assert before != after
    assert sum(after[0]) == pytest.approx(trainer_scores(actors, len(SEQUENCE)), abs=1e-3)


@pytest.mark.stack
def test_a_dead_engine_is_named(actors):
    process = ray.get(actors.rollout.engines[0].__ray_call__.remote(lambda engine: os.getpid()), timeout=60)
    os.kill(process, signal.SIGKILL)  # `ray.kill` returns before the actor is gone: it might still answer
    with pytest.raises(ActorError, match="weight sync: rollout engine 0 is gone"):
        actors.rollout.check_versions(0)
