"""Reward-augmented decoding: steer a language model's next tokens with a reward model.

Works with transformers' `generate()`; needs torch and transformers only.
"""

from openrlhf_ebft.rad.args import RADArgs
from openrlhf_ebft.rad.cached_value import CachedRewardModelValue
from openrlhf_ebft.rad.candidates import select_candidates
from openrlhf_ebft.rad.control import RAD
from openrlhf_ebft.rad.loading import load_sequence_classifier, sequence_classifier_class
from openrlhf_ebft.rad.processor import ValueGuidedProcessor, ValueStepRecord
from openrlhf_ebft.rad.protocol import Capability, ModelAccess, Requirements
from openrlhf_ebft.rad.reward_loss import prefix_reward_loss, prefix_rewards
from openrlhf_ebft.rad.reward_model_value import RewardModelValue
from openrlhf_ebft.rad.reward_training import PrefixRewardTrainSpec, train_prefix_reward_model
from openrlhf_ebft.rad.values import BaseCandidateValue, CandidateValue, StepContext, WeightedValue, extract_score

__all__ = [
    "RAD",
    "BaseCandidateValue",
    "CachedRewardModelValue",
    "CandidateValue",
    "Capability",
    "ModelAccess",
    "PrefixRewardTrainSpec",
    "RADArgs",
    "Requirements",
    "RewardModelValue",
    "StepContext",
    "ValueGuidedProcessor",
    "ValueStepRecord",
    "WeightedValue",
    "extract_score",
    "load_sequence_classifier",
    "prefix_reward_loss",
    "prefix_rewards",
    "select_candidates",
    "sequence_classifier_class",
    "train_prefix_reward_model",
]
