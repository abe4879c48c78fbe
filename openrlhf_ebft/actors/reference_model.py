"""Ray shell of the reference model of the KL term, and the group of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import ObjectRef
from torch import Tensor

from openrlhf_ebft.actors.pulse import start_pulse
from openrlhf_ebft.actors.restarts import Call, Crew
from openrlhf_ebft.actors.waiting import ActorError
from openrlhf_ebft.config.sections import EBFTConfig
from openrlhf_ebft.core.rollout_tree import RolloutTree
from openrlhf_ebft.core.step_batch import split_by_load
from openrlhf_ebft.distributed.device import local_device, plain_attention, set_compute_threads
from openrlhf_ebft.models.loading import DTYPES, load_causal_lm
from openrlhf_ebft.models.policy import PolicyModel
from openrlhf_ebft.models.reference_model import ReferenceModel


def load_reference_model(config: EBFTConfig) -> ReferenceModel:
    """Loads the reference model of `config` on this process's device."""
    device, mode = local_device(), config.model.attention
    model = load_causal_lm(
        config.reference.path or config.model.path,
        dtype=DTYPES[config.reference.dtype or config.model.dtype],
        attention=plain_attention(mode, device),
        trust_remote_code=config.model.trust_remote_code,
    )
    policy = PolicyModel(
        model.to(device),
        mode,
        temperature=config.rollout.temperature or 1.0,
        chunk_tokens=config.policy.logprob_chunk_tokens,
        with_entropy=False,
    )
    return ReferenceModel(policy, config.reference.max_tokens_per_batch)


class ReferenceModelActor:
    """One replica in a Ray worker."""

    def __init__(self, config: EBFTConfig) -> None:
        start_pulse()
        set_compute_threads(config.placement.threads_per_actor)
        self._model = load_reference_model(config)

    def is_up(self) -> bool:
        """Answers once the model is loaded."""
        return True

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[Tensor]:
        return self._model.logprobs(trees)


class ReferenceModelGroup:
    """Replicas of the reference model; trees go to the one with the fewest tokens. A lost one is started again."""

    def __init__(self, crew: Crew, config: EBFTConfig) -> None:
        self._crew = crew
        self._timeout_s = config.reference.timeout_s
        self._start_timeout_s = config.placement.start_timeout_s

    @property
    def names(self) -> list[str]:
        """The replicas' names, in order."""
        return self._crew.names

    def async_is_up(self) -> list[ObjectRef]:
        """References that are resolved when the replicas have loaded their model."""
        return [replica.is_up.remote() for replica in self._crew.handles]

    def logprobs(self, trees: Sequence[RolloutTree]) -> list[Tensor]:
        """Log-probabilities (B,) of each tree's completions, in the order of the trees; waits.

        Raises ActorError when a replica fails, or is lost and the budget of restarts is used up.
        """
        parts = split_by_load([len(tree) for tree in trees], len(self._crew))

        def share(numbers: Sequence[int]) -> Call:
            return lambda replica: replica.logprobs.remote([trees[i] for i in numbers])

        calls = {replica: share(part) for replica, part in enumerate(parts) if part}
        results = self._crew.call("reference model", calls, self._timeout_s, self._restart)
        found: dict[int, Tensor] = {}
        for replica, values in results.items():
            found.update(zip(parts[replica], values, strict=True))
        return [found[number] for number in range(len(trees))]

    def _restart(self, number: int, failure: ActorError) -> None:
        def ready(replica: Any) -> ObjectRef:
            return replica.is_up.remote()

        self._crew.restart(number, failure, ready, self._start_timeout_s)
