"""Placement by table: no Ray, no GPU."""

from collections import Counter

import pytest

from openrlhf_ebft.actors.free_resources import NodeResources
from openrlhf_ebft.actors.layout_report import layout_lines
from openrlhf_ebft.actors.placement import (
    AGGREGATOR,
    ENGINE,
    FEATURES,
    REFERENCE,
    TRAINER,
    Placement,
    PlacementError,
    list_roles,
    plan_placement,
    settle_sharing,
)
from openrlhf_ebft.actors.reward_training import rank_share
from openrlhf_ebft.config.rules import check_rules
from openrlhf_ebft.config.sections import EBFTConfig

GPU_NODE = NodeResources(cpus=96, gpus=8)


def make_config(**sections) -> EBFTConfig:
    return EBFTConfig(name="test", model={"path": "m"}, data={"path": "d"}, **sections)


def layout(ranks: int, engines: int, size: int, replicas: int, **placement) -> EBFTConfig:
    return make_config(
        policy={"num_ranks": ranks, "prompts_per_step": ranks},
        rollout={"num_engines": engines, "tensor_parallel_size": size},
        features={"num_replicas": replicas},
        placement=placement,
    )


def where(placement: Placement, role: str) -> list[int]:
    """The node of each actor of a role."""
    count = placement.role(role).count
    return [placement.nodes[placement.bundle_of(role, number)] for number in range(count)]


def check(placement: Placement, nodes: list[NodeResources]) -> None:
    """Every actor has one bundle, roles and bundles agree, and no node holds more than it has."""
    actors = Counter(actor for bundle in placement.bundles for actor in bundle.actors)
    assert set(actors.values()) == {1}
    assert sorted(actors) == sorted((role.name, i) for role in placement.roles for i in range(role.count))
    for i, node in enumerate(nodes):
        held = [bundle for bundle, at in zip(placement.bundles, placement.nodes, strict=True) if at == i]
        assert sum(bundle.cpus for bundle in held) <= node.cpus + 1e-6
        assert sum(bundle.gpus for bundle in held) <= node.gpus + 1e-6
    for bundle in placement.bundles:
        roles = [placement.role(name) for name, _ in bundle.actors]
        assert sum(role.cpus for role in roles) == pytest.approx(bundle.cpus)
        assert sum(role.gpus for role in roles) <= bundle.gpus + 1e-6


def test_the_default_run_fits_two_cores():
    nodes = [NodeResources(2, 0)]
    placement = plan_placement(make_config(), nodes)
    check(placement, nodes)
    assert [bundle.resources() for bundle in placement.bundles] == [{"CPU": 0.5}, {"CPU": 0.5}, *[{"CPU": 0.25}] * 2]
    assert not placement.shares_gpus


TABLE = {
    # cluster: (ranks, engines, tensor_parallel_size, replicas), nodes, GPUs of the bundles in order, shared?
    "1 GPU": ((1, 1, 1, 1), [NodeResources(8, 1)], [1, 0], True),
    "2 GPUs": ((2, 2, 1, 2), [NodeResources(16, 2)], [1, 1, 0], True),
    "3 GPUs": ((1, 1, 1, 1), [NodeResources(16, 3)], [1, 1, 1, 0], False),
    "8 GPUs": ((4, 2, 1, 2), [GPU_NODE], [1] * 8 + [0], False),
    "8 GPUs, TP 2": ((4, 1, 2, 2), [GPU_NODE], [1] * 4 + [2] + [1] * 2 + [0], False),
    "8 GPUs, shared": ((8, 8, 1, 8), [GPU_NODE], [1] * 8 + [0], True),
    "2 x 8": ((8, 2, 2, 4), [GPU_NODE] * 2, [1] * 8 + [2] * 2 + [1] * 4 + [0], False),
    "2 x 8, TP 8": ((4, 1, 8, 4), [GPU_NODE] * 2, [1] * 4 + [8] + [1] * 4 + [0], False),
    "8 x 8": ((32, 3, 8, 8), [GPU_NODE] * 8, [1] * 32 + [8] * 3 + [1] * 8 + [0], False),
}


@pytest.mark.parametrize("name", TABLE)
def test_table_of_clusters(name, capsys):
    sizes, nodes, gpus, shared = TABLE[name]
    placement = plan_placement(layout(*sizes), nodes)
    check(placement, nodes)
    with capsys.disabled():
        asked = "{} ranks, {} engines of {} GPUs, {} feature replicas".format(*sizes)
        print(f"\n{name}: {asked}", *layout_lines(placement, nodes), sep="\n  ")
    assert [bundle.gpus for bundle in placement.bundles] == gpus
    assert placement.shares_gpus == shared
    assert [placement.role(role).count for role in (TRAINER, ENGINE, FEATURES)] == [sizes[0], sizes[1], sizes[3]]


def test_tensor_parallel_engines_get_whole_nodes_and_ranks_the_others():
    placement = plan_placement(layout(32, 3, 8, 8), [GPU_NODE] * 8)
    engines = where(placement, ENGINE)
    assert len(set(engines)) == 3
    assert set(engines).isdisjoint(where(placement, TRAINER) + where(placement, FEATURES))
    assert set(Counter(where(placement, TRAINER)).values()) == {8}


def test_a_tensor_parallel_engine_is_not_spread_over_nodes():
    with pytest.raises(PlacementError, match="no node has room left for a rollout engine"):
        plan_placement(layout(1, 1, 4, 1), [NodeResources(8, 3)] * 3)


def test_roles_take_turns_on_one_gpu():
    placement = plan_placement(make_config(), [NodeResources(8, 1)])
    assert placement.bundles[0].actors == ((TRAINER, 0), (ENGINE, 0), (FEATURES, 0))
    assert placement.bundles[1].actors == ((AGGREGATOR, 0),)
    assert sum(placement.role(role).gpus for role in (TRAINER, ENGINE, FEATURES)) <= 1


def test_a_reference_model_shares_the_gpu_as_the_fourth_role():
    nodes = [NodeResources(8, 1)]
    placement = plan_placement(make_config(policy={"kl_coef": 0.1}), nodes)
    check(placement, nodes)
    assert {name for name, _ in placement.bundles[0].actors} == {TRAINER, ENGINE, FEATURES, REFERENCE}
    assert sum(role.gpus for role in placement.roles) == 1


SUPERVISED = {"policy": {"objective": "sft", "num_ranks": 2}, "placement": {"gpus_per_feature_replica": 0}}


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"evaluation": {"max_examples": 0}}, [TRAINER]),
        ({"evaluation": {"max_examples": 1}}, [TRAINER, ENGINE, FEATURES, AGGREGATOR]),
        (
            {"evaluation": {"max_examples": 1}, "features": {"source": "policy_base"}, "lora": {"rank": 2}},
            [TRAINER, ENGINE, AGGREGATOR],
        ),
    ],
)
def test_supervised_training_without_evaluation_is_the_trainer_alone(sections, names):
    config = make_config(**SUPERVISED, **sections)
    assert [role.name for role in list_roles(config, with_gpus=True)] == names
    assert config.base_model_gives_features == (config.samples_completions and FEATURES not in names)


def test_a_trainer_alone_asks_for_nothing_that_only_others_need():
    """Not the GPUs of an engine's tensor parallelism, nor a feature replica's for flex attention."""
    alone = {"evaluation": {"max_examples": 0}, "rollout": {"tensor_parallel_size": 2, "weight_transfer": "nccl"}}
    config = make_config(**SUPERVISED, **alone)
    placement = plan_placement(config, [NodeResources(2, 0)])
    check(placement, [NodeResources(2, 0)])
    assert placement.role(ENGINE).count == 0
    config.model.attention = "flex"
    shared = plan_placement(config, [NodeResources(4, 2)])
    assert [bundle.gpus for bundle in shared.bundles] == [1, 1]


def test_sharing_can_be_asked_for_and_refused():
    always = plan_placement(layout(2, 2, 1, 2, share_gpus="always"), [GPU_NODE])
    assert always.shares_gpus and [bundle.gpus for bundle in always.bundles] == [1, 1, 0]
    with pytest.raises(PlacementError, match="asked: 1.5 CPU, 3 GPU"):
        plan_placement(make_config(placement={"share_gpus": "never"}), [NodeResources(8, 1)])
    with pytest.raises(PlacementError, match="tensor_parallel_size = 2; set it to 1"):
        plan_placement(layout(1, 1, 2, 1, share_gpus="always"), [GPU_NODE])


def test_shared_gpus_that_are_too_few_are_counted_as_shared():
    with pytest.raises(PlacementError, match="on shared GPUs\n  asked: .* 4 GPU") as error:
        plan_placement(layout(4, 1, 1, 1), [NodeResources(8, 2)])
    assert "node 0: 8 CPU, 2 GPU" in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus_per_rank", "wanted"),
    [(2, 2, 1.0, "ipc"), (1, 2, 1.0, "object_store"), (2, 2, 0.0, "object_store")],
)
def test_engines_on_shared_gpus_sleep_and_get_weights_without_nccl(ranks, engines, gpus_per_rank, wanted):
    config = layout(ranks, engines, 1, 1, share_gpus="always", gpus_per_trainer_rank=gpus_per_rank)
    settled = settle_sharing(config, plan_placement(config, [GPU_NODE])).rollout
    assert (settled.weight_transfer, settled.sleep) == (wanted, True)
    assert config.rollout.sleep is None


def test_engines_with_gpus_of_their_own_stay_awake():
    config = layout(4, 2, 1, 2)
    assert settle_sharing(config, plan_placement(config, [GPU_NODE])) is config


def test_nccl_between_roles_on_one_gpu_is_refused():
    config = make_config(rollout={"weight_transfer": "nccl"})
    with pytest.raises(PlacementError, match="weight_transfer to auto, or placement.share_gpus to never"):
        settle_sharing(config, plan_placement(config, [NodeResources(8, 1)]))


def test_shares_of_gpus_lie_on_one_device():
    """Three times 0.6 of a GPU is less than two GPUs, but no two of them fit on one device."""
    config = layout(3, 1, 1, 1, gpus_per_trainer_rank=0.6, gpus_per_feature_replica=0, share_gpus="never")
    with pytest.raises(PlacementError, match="no node has room left for a policy trainer"):
        plan_placement(config, [NodeResources(8, 3)])
    check(plan_placement(config, [NodeResources(8, 4)]), [NodeResources(8, 4)])
    assert "whole GPUs only" in check_rules(layout(1, 1, 1, 1, gpus_per_trainer_rank=1.5))[0]


def test_cpus_first_finds_a_place_where_gpus_first_does_not():
    """By GPUs first, the engine would take the node with many CPUs and leave none for the trainer rank."""
    config = make_config(
        placement={"trainer_cpus": 6, "gpus_per_trainer_rank": 0, "rollout_cpus": 4, "gpus_per_feature_replica": 0}
    )
    nodes = [NodeResources(7, 1), NodeResources(5, 2)]
    placement = plan_placement(config, nodes)
    check(placement, nodes)
    assert (where(placement, TRAINER), where(placement, ENGINE)) == ([0], [1])


def test_contiguous_ranks_whatever_ray_has_done():
    placement = plan_placement(layout(4, 1, 1, 1), [GPU_NODE])
    rays = {0: "b", 1: "a", 2: "b", 3: "a", 4: "a", 5: "b", 6: "a"}
    used = placement.contiguous(rays)
    assert sorted(used) == list(range(7))
    assert [rays[used[placement.bundle_of(TRAINER, i)]] for i in range(4)] == ["a", "a", "b", "b"]
    assert used[4:] == [4, 5, 6]


def test_a_layout_that_cannot_fit_says_asked_available_and_what_to_change(capsys):
    """Case B11: 2 CPUs asked, 1 there."""
    with pytest.raises(PlacementError) as error:
        plan_placement(make_config(placement={"trainer_cpus": 2.0}), [NodeResources(1, 0)])
    text = str(error.value)
    with capsys.disabled():
        print(f"\n{text}")
    assert "asked: 3 CPU" in text
    assert "node 0: 1 CPU, 0 GPU" in text
    assert "section placement" in text
    assert text.splitlines()[-1] == "  no node has room left for a policy trainer (2 CPU, 0 GPU)"


def test_a_gpu_asked_of_a_cluster_without_any_is_refused():
    """Case B11, second part: no silent run on CPUs where GPUs were meant."""
    nodes = [NodeResources(4, 0)]
    with pytest.raises(PlacementError, match="asked: 3 GPU; available: node 0: 4 CPU, 0 GPU"):
        plan_placement(make_config(placement={"require_gpus": True}), nodes)
    with pytest.raises(PlacementError, match="tensor_parallel_size = 2 needs GPUs"):
        plan_placement(layout(1, 1, 2, 1), nodes)


def test_busy_gpus_are_not_taken_for_a_cluster_without_gpus():
    with pytest.raises(PlacementError, match=r"0 GPU \(of 8\)"):
        plan_placement(make_config(), [NodeResources(96, 0, total_gpus=8)])


@pytest.mark.parametrize(
    ("with_gpus", "placement", "cause"),
    [(False, {}, "the cluster has none"), (True, {"gpus_per_feature_replica": 0}, "gpus_per_feature_replica = 0")],
)
def test_flex_attention_is_refused_where_an_actor_would_have_no_gpu(with_gpus, placement, cause):
    config = make_config(placement=placement).model_copy(deep=True)
    config.model.attention = "flex"
    with pytest.raises(PlacementError, match=f"model.attention = flex needs GPUs, but .*{cause}.*split or sdpa"):
        list_roles(config, with_gpus=with_gpus)
    config.placement.gpus_per_feature_replica = 0.5
    assert [role.gpus for role in list_roles(config, with_gpus=True)] == [1, 1, 0.5, 0]


@pytest.mark.parametrize(
    ("with_gpus", "placement", "cause"),
    [(False, {}, "the cluster has none"), (True, {"gpus_per_trainer_rank": 0}, "gpus_per_trainer_rank = 0")],
)
def test_float16_is_refused_where_a_trainer_rank_would_have_no_gpu(with_gpus, placement, cause):
    config = make_config(placement=placement)
    config.model.dtype = "float16"
    with pytest.raises(PlacementError, match=f"model.dtype = float16 trains on GPUs alone.*{cause}.*bfloat16"):
        list_roles(config, with_gpus=with_gpus)
    config.placement.gpus_per_trainer_rank = 1.0
    assert list_roles(config, with_gpus=True)[0].gpus == 1


@pytest.mark.parametrize(("gpus", "shared"), [(1, True), (4, False)])
def test_a_reference_model_has_a_place_of_its_own(gpus, shared):
    nodes = [NodeResources(8, gpus)]
    placement = plan_placement(make_config(policy={"kl_coef": 0.1}), nodes)
    check(placement, nodes)
    assert where(placement, REFERENCE) == [0]
    assert placement.shares_gpus is shared
    bundles = {placement.bundle_of(role, 0) for role in (TRAINER, ENGINE, FEATURES, REFERENCE)}
    assert len(bundles) == (1 if shared else 4)


def test_ranks_of_reward_training_get_a_gpu_each_or_are_refused():
    assert rank_share(2, {"CPU": 2.0}) == {"num_cpus": 1, "num_gpus": 0}
    assert rank_share(2, {"CPU": 8.0, "GPU": 2.0}) == {"num_cpus": 1, "num_gpus": 1}
    with pytest.raises(PlacementError, match="needs as many CPUs, the cluster has 1: set it to at most 1"):
        rank_share(2, {"CPU": 1.0})
    with pytest.raises(PlacementError, match="training.ranks = 4 needs as many GPUs, the cluster has 2"):
        rank_share(4, {"CPU": 8.0, "GPU": 2.0})
