"""Prometheus metrics: vLLM's own, the server's and the RAD processor's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from openrlhf_ebft.serving.app import Admission
from openrlhf_ebft.serving.following import Follower

_TOTALS = {
    "requests": "Requests with RAD that reached the engine.",
    "failed_requests": "Requests that RAD had to end.",
    "steered_tokens": "Tokens chosen under RAD.",
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


async def metrics_text(client: Any, admission: Admission, follower: Follower) -> str:
    """All metrics of this replica in Prometheus' text format.

    Args:
        client: vLLM's AsyncLLM.
        admission: the server's counts.
        follower: tells which weights are served.
    """
    statistics = (await client.collective_rpc("rad_statistics"))[0]
    registry = CollectorRegistry()
    families = [*_server_families(admission, follower), *_rad_families(statistics)]
    registry.register(_Snapshot(families))
    return (generate_latest(REGISTRY) + generate_latest(registry)).decode("utf-8")


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
