"""The reward functions under their documented names; needs only torch."""

from openrlhf_ebft.core.advantages import compute_advantages
from openrlhf_ebft.core.feature_matching import cfm_loss, cfm_loss_unbiased
from openrlhf_ebft.core.gram import group_gram
from openrlhf_ebft.core.pooling import apply_embed_method
from openrlhf_ebft.core.rewards import (
    GroupRewards,
    compute_rewards,
    compute_rewards_from_embeddings,
    get_alignment_rewards,
    get_diversity_rewards,
)
from openrlhf_ebft.core.whitening import whiten_embeddings_batched
from openrlhf_ebft.models.hidden_states import extract_hidden_states

__all__ = [
    "GroupRewards",
    "apply_embed_method",
    "cfm_loss",
    "cfm_loss_unbiased",
    "compute_advantages",
    "compute_rewards",
    "compute_rewards_from_embeddings",
    "extract_hidden_states",
    "get_alignment_rewards",
    "get_diversity_rewards",
    "group_gram",
    "whiten_embeddings_batched",
]
