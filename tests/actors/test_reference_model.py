"""Reference model actors give what one reference model in this process gives, also after one of them is lost."""

import pytest
import ray
import torch

from openrlhf_ebft.actors.placement import REFERENCE, list_roles
from openrlhf_ebft.actors.reference_model import ReferenceModelActor, ReferenceModelGroup, load_reference_model
from openrlhf_ebft.actors.restarts import Crew, RestartBudget
from openrlhf_ebft.config.sections import EBFTConfig
from tests.tiny_models import tiny_llama
from tests.trees import make_reference, make_tree

SHAPES = ((9, [4], [[3, 6]]), (14, [7], [[2, 4]]), (6, [3], [[1, 5]]), (12, [5, 8], [[4, 2], [3, 3]]))
TREES = [make_tree(make_reference(size, anchors, seed=i), lengths) for i, (size, anchors, lengths) in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    tiny_llama(folder)
    return EBFTConfig(
        name="test",
        model={"path": "unused", "dtype": "float32"},
        data={"path": "unused"},
        policy={"kl_coef": 0.1},
        reference={"path": str(folder), "num_replicas": 2},
        recovery={"backoff_s": 0.1},
        placement={"threads_per_actor": 1},
    )


@pytest.fixture(scope="module")
def crew(config):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(ReferenceModelActor).options(num_cpus=0)
    budget = RestartBudget(config.recovery, print)
    yield Crew(["reference model 0", "reference model 1"], lambda i: actor.remote(config), budget, heartbeat_s=60)
    ray.shutdown()


@pytest.mark.stack
def test_replicas_give_what_one_model_in_this_process_gives(config, crew):
    group = ReferenceModelGroup(crew, config)
    expected = load_reference_model(config).logprobs(TREES)
    for _ in range(2):
        values = group.logprobs(TREES)
        for value, own in zip(values, expected, strict=True):
            torch.testing.assert_close(value, own, atol=1e-6, rtol=0)
        ray.kill(crew.handles[1])  # the second round finds it gone


def test_no_reference_model_is_placed_without_a_kl_term():
    def names(**sections):
        config = EBFTConfig(name="test", model={"path": "m"}, data={"path": "d"}, **sections)
        return [(role.name, role.count, role.gpus) for role in list_roles(config, with_gpus=True)]

    assert REFERENCE not in [name for name, *_ in names()]
    assert (REFERENCE, 2, 1.0) in names(policy={"kl_coef": 0.1}, reference={"num_replicas": 2})
    base = names(policy={"kl_coef": 0.1}, reference={"source": "policy_base"}, lora={"rank": 4})
    assert REFERENCE not in [name for name, *_ in base]
