"""Metrics of several replicas as one page, read back by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from openrlhf_ebft.serving.metrics import joined_metrics


def replica_text(requests: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:requests", "Requests.", ["kind"], registry=registry).labels('a "b"').inc(requests)
    Histogram("seconds", "Seconds.", buckets=[1, 2], registry=registry).observe(1.5)
    Gauge("used", "Tokens.", registry=registry).set(requests)
    return generate_latest(registry).decode()


def test_every_sample_says_which_replica_and_every_family_comes_once():
    text = joined_metrics({"one": replica_text(2), "two": replica_text(5)})
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert text.count("# TYPE vllm:requests_total counter") == 1
    found = {(s.name, s.labels.get("replica"), s.labels.get("le")): s for family in families for s in family.samples}
    assert found["vllm:requests_total", "one", None].value == 2
    assert found["vllm:requests_total", "two", None].value == 5
    assert found["vllm:requests_total", "two", None].labels["kind"] == 'a "b"'
    assert [found["seconds_bucket", "two", edge].value for edge in ("1.0", "2.0", "+Inf")] == [0, 1, 1]
    assert found["used", "two", None].value == 5
    assert found["rad_server_replicas", None, None].value == 2


def test_a_replica_that_did_not_answer_is_not_counted():
    assert "rad_server_replicas 1.0" in joined_metrics({"one": replica_text(1)})
