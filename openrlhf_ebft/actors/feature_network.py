"""Ray shell of the frozen feature network, and the group of its replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ray import ObjectRef

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Call, Crew
from openrlhf_ebft.actors.waiting import ActorError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import split_by_load
from openrlhf_ebft.core.step_rewards import GroupProducts
from openrlhf_ebft.distributed.device import local_device, plain_attention, set_compute_threads
from openrlhf_ebft.models.feature_network import load_feature_network
from openrlhf_ebft.models.loading import DTYPES
from openrlhf_ebft.models.tree_features import TreeFeatures


class FeatureNetworkActor:
    """One replica in a Ray worker. Embeddings stay here; only the groups' inner products leave."""

    def __init__(self, config: EBFTConfig, special_ids: Collection[int]) -> None:
        start_pulse()
        set_compute_threads(config.placement.threads_per_actor)
        device = local_device()
        mode = config.model.attention
        network = load_feature_network(
            config.features.path or config.model.path,
            config.features.layer_fractions,
            DTYPES[config.features.dtype or config.model.dtype],
            attention=plain_attention(mode, device),
            trust_remote_code=config.model.trust_remote_code,
        )
        self._features = TreeFeatures(network.to(device), config.features, special_ids=special_ids, mode=mode)

    def layer_indices(self) -> list[int]:
        """Tapped depths; also says that the replica is up."""
        return self._features.network.layer_indices

    def products(self, trees: Sequence[RolloutTree]) -> GroupProducts:
        """Inner products of every tree's groups."""
        grams = self._features.group_grams(trees)
        return [(tree.example_id, gram) for tree, gram in zip(trees, grams, strict=True)]


class FeatureNetworkGroup:
    """Replicas of the feature network; trees go to the one with the fewest tokens. A lost one is started again."""

    def __init__(self, crew: Crew, config: EBFTConfig) -> None:
        self._crew = crew
        self._timeout_s = config.features.timeout_s
        self._start_timeout_s = config.placement.start_timeout_s

    @property
    def names(self) -> list[str]:
        """The replicas' names, in order."""
        return self._crew.names

    def products(self, trees: Sequence[RolloutTree]) -> list[ObjectRef]:
        """References to the `GroupProducts` of all trees; waits until every replica has computed its share.

        Raises ActorError when a replica fails, or is lost and the budget of restarts is used up.
        """
        parts = split_by_load([len(tree) for tree in trees], len(self._crew.handles))
        references: dict[int, ObjectRef] = {}

        def share(number: int) -> Call:
            def call(replica: Any) -> ObjectRef:
                references[number] = replica.products.remote([trees[i] for i in parts[number]])
                return references[number]

            return call

        calls = {number: share(number) for number, part in enumerate(parts) if part}
        self._crew.call("features", calls, self._timeout_s, self._restart)
        return [references[number] for number in calls]

    def async_layer_indices(self) -> list[ObjectRef]:
        """References to the tapped depths of every replica; resolved when it is up."""
        return [replica.layer_indices.remote() for replica in self._crew.handles]

    def _restart(self, number: int, failure: ActorError) -> None:
        self._crew.restart(number, failure, lambda replica: replica.layer_indices.remote(), self._start_timeout_s)
