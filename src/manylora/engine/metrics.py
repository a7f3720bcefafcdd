"""The engine's Prometheus metrics, exported by vLLM's own `/metrics` (docs/metrics.md lists them).

`vllm:num_loras_in_gpu` and `vllm:num_loras_in_cpu` are the names that published dashboards use; a vLLM that exports
them itself keeps its own.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

_LOAD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EngineMetrics:
    """Counts loads, hits and evictions, and shows what is where. One per API server process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._loads = Counter(
            "manylora:adapter_loads", "Adapter loads by tier and result", ["tier", "result"], registry=registry
        )
        self._seconds = Histogram(
            "manylora:adapter_load_seconds",
            "Request for an adapter to its being in adapter memory",
            ["source"],
            buckets=_LOAD_SECONDS,
            registry=registry,
        )
        self._waits = Histogram(
            "manylora:adapter_wait_seconds",
            "Arrival of a request to its adapter's being in adapter memory",
            buckets=(0.0001, *_LOAD_SECONDS, 60.0),
            registry=registry,
        )
        self._waiting = Gauge("manylora:adapter_waiting", "Requests that wait for adapter memory", registry=registry)
        self._budget = Gauge("manylora:adapter_budget_bytes", "Bytes that a tier may take", ["tier"], registry=registry)
        self._hits = Counter(
            "manylora:adapter_hits", "Requests that found their adapter in a tier", ["tier"], registry=registry
        )
        self._evictions = Counter(
            "manylora:adapter_evictions",
            "Adapters that lost their place, by tier and reason",
            ["tier", "reason"],
            registry=registry,
        )
        self._adapters = Gauge("manylora:adapters", "Adapters in a tier", ["tier"], registry=registry)
        self._bytes = Gauge("manylora:adapter_bytes", "Bytes of adapters in a tier", ["tier"], registry=registry)
        self._in_step = Gauge("manylora:adapter_in_step_loads", "Loads that a step had to wait for", registry=registry)
        self._gpu = _unless_exported("vllm:num_loras_in_gpu", "Adapters in adapter memory", registry)
        self._cpu = _unless_exported("vllm:num_loras_in_cpu", "Adapters in adapter memory", registry)

    def loaded(self, seconds: float, source: str) -> None:
        """A version reached adapter memory, from the tier `source`, after `seconds`."""
        self._loads.labels("device", "ok").inc()
        self._seconds.labels(source).observe(seconds)

    def load_failed(self) -> None:
        """A load ended in an error."""
        self._loads.labels("device", "failed").inc()

    def hit(self) -> None:
        """A request found its version in adapter memory."""
        self._hits.labels("device").inc()

    def evicted(self, reason: str) -> None:
        """A version left adapter memory."""
        self._evictions.labels("device", reason).inc()

    def waited(self, seconds: float) -> None:
        """A request's adapter was in adapter memory so many seconds after the request came."""
        self._waits.observe(seconds)

    def show(self, *, adapters: int, used_bytes: int, budget_bytes: int, in_step_loads: int, waiting: int) -> None:
        """Set the gauges from what the workers and the account say."""
        self._budget.labels("device").set(budget_bytes)
        self._waiting.set(waiting)
        for gauge in (self._gpu, self._cpu):
            if gauge is not None:
                gauge.set(adapters)
        self._adapters.labels("device").set(adapters)
        self._bytes.labels("device").set(used_bytes)
        self._in_step.set(in_step_loads)


def _unless_exported(name: str, text: str, registry: CollectorRegistry) -> Gauge | None:
    try:
        return Gauge(name, text, registry=registry)
    except ValueError:
        return None
