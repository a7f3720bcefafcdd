"""What the documents promise: every metric is listed, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from manylora.agent.metrics import AgentMetrics
from manylora.engine.metrics import EngineMetrics
from manylora.gateway.metrics import GatewayMetrics

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def families() -> set[str]:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    tier: Any = SimpleNamespace(size_bytes=1, used_bytes=0, budget_bytes=1, evictions=0)
    AgentMetrics(registry).watch(SimpleNamespace(arena=tier, blocks=list, evictions=0), tier)
    return {family.name for source in (registry, GatewayMetrics().registry) for family in source.collect()}


def listed() -> set[str]:
    return set(re.findall(r"^\| `((?:manylora|vllm):[a-z_]+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))


def test_every_metric_is_listed_and_every_listed_one_exists() -> None:
    assert families() == listed()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    missing = [target for target in _LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []
