"""The agent's Prometheus metrics (docs/metrics.md lists them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # they bring PyTorch
    from manylora.agent.disk_budget import DiskBudget
    from manylora.agent.stager import Stager

_STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class AgentMetrics:
    """Times of what is staged, and what the tiers hold."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._seconds = Histogram(
            "manylora:agent_stage_seconds",
            "Request for a packed adapter to its being in host memory",
            ["source"],
            buckets=_STAGE_SECONDS,
            registry=registry,
        )
        self._adapters = Gauge("manylora:agent_adapters", "Adapters in a tier", ["tier"], registry=registry)
        self._bytes = Gauge("manylora:agent_bytes", "Bytes of adapters in a tier", ["tier"], registry=registry)
        self._budget = Gauge("manylora:agent_budget_bytes", "Bytes that a tier may take", ["tier"], registry=registry)

    def staged(self, source: str, seconds: float) -> None:
        """A packed adapter is in host memory."""
        self._seconds.labels(source).observe(seconds)

    def watch(self, stager: Stager, disk: DiskBudget) -> None:
        """Show what these hold whenever metrics are read."""
        self._adapters.labels("host").set_function(lambda: len(stager.blocks()))
        self._bytes.labels("host").set_function(lambda: stager.arena.used_bytes)
        self._budget.labels("host").set(stager.arena.size_bytes)
        self._bytes.labels("disk").set_function(lambda: disk.used_bytes)
        self._budget.labels("disk").set(disk.budget_bytes)
        self.registry.register(_Evictions(stager, disk))


class _Evictions(Collector):
    def __init__(self, stager: Stager, disk: DiskBudget) -> None:
        self._stager, self._disk = stager, disk

    def collect(self) -> Any:
        family = CounterMetricFamily(
            "manylora:agent_evictions", "Adapters that left a tier for others", labels=["tier"]
        )
        family.add_metric(["host"], self._stager.evictions)
        family.add_metric(["disk"], self._disk.evictions)
        yield family
