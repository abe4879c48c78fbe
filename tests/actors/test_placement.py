"""Placement by table: no Ray, no GPU."""

import pytest

from openrlhf_ebft.actors.placement import NodeResources, PlacementError, list_roles, plan_bundles
from openrlhf_ebft.config.sections import EBFTConfig


def make_config(**sections) -> EBFTConfig:
    return EBFTConfig(name="test", model={"path": "m"}, data={"path": "d"}, **sections)


def test_the_default_run_fits_two_cores():
    roles = list_roles(make_config(), with_gpus=False)
    bundles = plan_bundles(roles, [NodeResources(2, 0)])
    assert bundles == [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.25}]


@pytest.mark.parametrize(
    ("sections", "nodes", "gpus"),
    [
        ({}, [NodeResources(8, 3)], [1, 1, 1, 0]),
        ({"policy": {"num_ranks": 4, "prompts_per_step": 16}}, [NodeResources(8, 8)], [1, 1, 1, 1, 1, 1, 0]),
        ({"rollout": {"num_engines": 2, "tensor_parallel_size": 2}}, [NodeResources(8, 4)] * 2, [1, 2, 2, 1, 0]),
        ({"features": {"num_replicas": 2}}, [NodeResources(8, 2)] * 2, [1, 1, 1, 1, 0]),
    ],
)
def test_roles_ask_for_gpus_where_there_are_some(sections, nodes, gpus):
    bundles = plan_bundles(list_roles(make_config(**sections), with_gpus=True), nodes)
    assert [bundle.get("GPU", 0) for bundle in bundles] == gpus


def test_a_tensor_parallel_engine_is_not_spread_over_nodes():
    config = make_config(rollout={"tensor_parallel_size": 4})
    with pytest.raises(PlacementError, match="no node has room left for a rollout engine"):
        plan_bundles(list_roles(config, with_gpus=True), [NodeResources(8, 3)] * 3)


def test_a_layout_that_cannot_fit_says_asked_available_and_what_to_change():
    """Case B11: 2 CPUs asked, 1 there."""
    config = make_config(placement={"trainer_cpus": 2.0})
    with pytest.raises(PlacementError) as error:
        plan_bundles(list_roles(config, with_gpus=False), [NodeResources(1, 0)])
    text = str(error.value)
    assert "policy trainer (2 CPU, 0 GPU)" in text
    assert "asked: 3 CPU" in text
    assert "node 0: 1 CPU, 0 GPU" in text
    assert "section placement" in text
