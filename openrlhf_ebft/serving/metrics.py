"""Prometheus metrics: vLLM's own, the server's and the RAD processor's, of one replica and of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from openrlhf_ebft.serving.app import Admission
from openrlhf_ebft.serving.following import Follower

_TOTALS = {
    "requests": "Requests with RAD that reached the engine.",
    "failed_requests": "Requests that RAD had to end.",
    "steered_tokens": "Tokens chosen under RAD.",
    "ruled_out_candidates": "Candidates of greedy requests that could not win and were not scored.",
}
_MODEL_TOTALS = {
    "forwards": "Forward passes of the reward model.",
    "forward_seconds": "Time in forward passes of the reward model.",
    "candidate_tokens": "Candidates scored.",
    "prefix_tokens": "Prefix tokens computed.",
    "rows_without_room": "Steps of a request scored without room in the cache.",
}
_MODEL_LEVELS = {
    "cache_tokens_used": "Tokens of running requests in the cache.",
    "cache_tokens": "Tokens that the cache holds.",
    "cache_bytes": "Memory of the cache.",
}


class _Snapshot:
    """Numbers gathered for one answer, as a collector."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """The families, as prometheus_client asks for them."""
        return self._families


async def replica_metrics(client: Any, admission: Admission, follower: Follower) -> str:
    """All metrics of this replica in Prometheus' text format.

    Args:
        client: vLLM's AsyncLLM.
        admission: the server's counts.
        follower: tells which weights are served.
    """
    statistics = (await client.collective_rpc("rad_statistics"))[0]
    families = [*_server_families(admission, follower), *_rad_families(statistics)]
    return generate_latest(REGISTRY).decode("utf-8") + _as_text(families)


def joined_metrics(texts: Mapping[str, str]) -> str:
    """The metrics of several replicas as one text: every sample gets the label `replica`.

    Args:
        texts: by replica, what `replica_metrics` gave there.
    """
    families: dict[tuple[str, str], Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(
                (family.name, family.type), Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = sample.labels | {"replica": replica}
                joined.add_sample(sample.name, labels, sample.value)
    counted = GaugeMetricFamily("rad_server_replicas", "Replicas whose numbers are here.", value=len(texts))
    return _as_text([*families.values(), counted])


def _as_text(families: Iterable[Metric]) -> str:
    registry = CollectorRegistry()
    registry.register(_Snapshot(families))
    return generate_latest(registry).decode("utf-8")


def _server_families(admission: Admission, follower: Follower) -> Iterator[Metric]:
    answers = CounterMetricFamily("rad_server_requests", "Answered requests.", labels=["path", "status"])
    for (path, status), count in sorted(admission.answers.items()):
        answers.add_metric([path, str(status)], count)
    yield answers
    yield GaugeMetricFamily("rad_server_running_requests", "Requests being answered.", value=admission.running)
    yield CounterMetricFamily("rad_server_weight_swaps", "Changes of weights.", value=follower.swaps)
    yield CounterMetricFamily("rad_server_weight_refusals", "Newer weights left alone.", value=follower.refusals)
    weights = GaugeMetricFamily("rad_server_weights", "Which weights are served.", labels=["version"])
    weights.add_metric([follower.version], 1)
    yield weights


def _rad_families(statistics: dict[str, Any]) -> Iterator[Metric]:
    for name, text in _TOTALS.items():
        yield CounterMetricFamily(f"rad_{name}", text, value=statistics[name])
    kinds = ((_MODEL_TOTALS, CounterMetricFamily), (_MODEL_LEVELS, GaugeMetricFamily))
    for table, kind in kinds:
        for name, text in table.items():
            family = kind(f"rad_reward_{name}", text, labels=["reward_model"])
            for model, values in statistics["reward_models"].items():
                family.add_metric([model], values[name])
            yield family
