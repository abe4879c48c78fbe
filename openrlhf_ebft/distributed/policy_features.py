"""Features from the trainer's own base model: its adapters are off, so no second copy is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.models.feature_network import FeatureNetwork, layer_index
from openrlhf_ebft.models.hidden_states import num_blocks
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.tree_features import TreeFeatures


class PolicyBaseFeatures:
    """Taps the frozen weights of an adapted policy. Every call is collective under ZeRO-3."""

    def __init__(self, policy: PolicyModel, config: EBFTConfig, special_ids: Collection[int]) -> None:
        """
        Args:
            policy: with adapters, in eval mode.
            config: the run's configuration; `features.source` is policy_base.
            special_ids: tokens that do not enter pooling.
        """
        self._adapters = policy.adapters
        self._one_by_one = config.deepspeed.zero_stage == 3
        backbone = policy.model.base_model
        whole = num_blocks(backbone)
        self.layer_indices = [layer_index(fraction, whole) for fraction in config.features.layer_fractions]
        with self._adapters.disabled():
            network = FeatureNetwork(backbone, self.layer_indices, whole, freeze=False)
            self._features = TreeFeatures(
                network, config.features, special_ids=special_ids, mode=config.model.attention
            )

    def group_grams(self, trees: Sequence[RolloutTree], num_passes: int, filler: RolloutTree) -> list[Tensor]:
        """As `TreeFeatures.group_grams`.

        Args:
            trees: this rank's.
            num_passes: at least as many as any rank has trees; sharded weights need as many passes on every rank.
            filler: the tree for passes without any of this rank's own.
        """
        with self._adapters.disabled():
            if not self._one_by_one:
                return self._features.group_grams(trees)
            padded = [*trees, *[filler] * (num_passes - len(trees))]
            return [self._features.group_grams([tree])[0] for tree in padded][: len(trees)]
