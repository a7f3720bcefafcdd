"""What the agent tells over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agent_node import EXACT_LAYOUT, Node, settle  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from manylora.agent.disk_budget import DiskBudget  # noqa: E402
from manylora.agent.http import HttpServer  # noqa: E402
from manylora.agent.metrics import AgentMetrics  # noqa: E402
from manylora.agent.stager import Stager  # noqa: E402


class Told:
    """An agent's HTTP side, and the parts that it tells of."""

    def __init__(self, node: Node, path: Path) -> None:
        self.node, self.path = node, path
        self.metrics = AgentMetrics(CollectorRegistry())
        self.stager = Stager(node.disk, node.files, node.stager(4 << 12).arena, self.metrics.staged)
        self.budget = DiskBudget(node.disk, node.files, 1 << 30)
        self.metrics.watch(self.stager, self.budget)
        self.server = HttpServer(path, self.metrics, self.stager)
        self.server.start()

    def ask(self, line: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.path))
            connection.sendall(line + b"\r\n\r\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *headers = head.decode().split("\r\n")
        fields = dict(header.split(": ", 1) for header in headers)
        return int(status.split()[1]), fields, body

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return self.ask(f"GET {path} HTTP/1.1".encode())

    def samples(self) -> dict[tuple[str, str], float]:
        """Values by name and the one label."""
        _, _, body = self.get("/metrics")
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(Node(tmp_path / "disk"), tmp_path / "http.sock")
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.stager.close()


def test_it_is_well(told: Told) -> None:
    status, headers, body = told.get("/healthz")
    assert (status, headers["Content-Type"], body) == (200, "text/plain", b"ok\n")
    assert headers["Content-Length"] == "3"


def test_only_this_user_may_ask(told: Told) -> None:
    assert told.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["/", "/healthz/", "/metrics/x", "/v1/residency/../x", "//"])
def test_other_routes_are_not_there(told: Told, path: str) -> None:
    assert told.get(path)[0] == 404


@pytest.mark.parametrize("line", [b"POST /healthz HTTP/1.1", b"DELETE /v1/residency HTTP/1.1"])
def test_nothing_can_be_changed(told: Told, line: bytes) -> None:
    assert told.ask(line)[0] == 501


@pytest.mark.parametrize("line", [b"\x00\xff", b"GET", b"GET / HTTP/9.9", b"x" * 70_000])
def test_garbage_leaves_it_well(told: Told, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(told.path))
        connection.sendall(line + b"\r\n\r\n")
    assert told.get("/healthz")[0] == 200


def test_what_is_in_host_memory(told: Told) -> None:
    first, second = told.node.publish(), told.node.publish()
    held, _ = told.stager.stage(first, EXACT_LAYOUT)
    block, _ = told.stager.stage(second, EXACT_LAYOUT)
    told.stager.release(block)
    settle(told.stager)
    status, headers, body = told.get("/v1/residency")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    shown = json.loads(body)
    assert shown["host"] == [
        {"digest": first, "layout": EXACT_LAYOUT.key, "size_bytes": held.nbytes, "leases": 1},
        {"digest": second, "layout": EXACT_LAYOUT.key, "size_bytes": block.nbytes, "leases": 0},
    ]
    assert shown["budget"] == {"bytes": told.stager.arena.size_bytes, "used_bytes": told.stager.arena.used_bytes}


def test_an_empty_memory(told: Told) -> None:
    assert json.loads(told.get("/v1/residency")[2]) == {
        "host": [],
        "budget": {"bytes": told.stager.arena.size_bytes, "used_bytes": 0},
    }


def test_metrics_follow_what_happens(told: Told) -> None:
    digests = [told.node.publish() for _ in range(3)]
    for digest in (*digests, digests[2]):
        told.stager.release(told.stager.stage(digest, EXACT_LAYOUT)[0])
        settle(told.stager)
    told.stager.release(told.stager.stage(digests[0], EXACT_LAYOUT)[0])
    told.budget.budget_bytes = 0
    told.budget.enforce()
    samples = told.samples()

    def value(name: str, label: str) -> Any:
        return samples[f"manylora:agent_{name}", label]

    assert value("stage_seconds_count", "folder") == 3
    assert value("stage_seconds_count", "packed") == 1
    assert value("stage_seconds_count", "host") == 1
    assert value("adapters", "host") == len(told.stager.blocks()) == 2
    assert value("bytes", "host") == told.stager.arena.used_bytes
    assert value("budget_bytes", "host") == told.stager.arena.size_bytes
    assert value("bytes", "disk") == told.budget.used_bytes == 0
    assert value("evictions_total", "host") == told.stager.evictions == 2
    assert value("evictions_total", "disk") == told.budget.evictions == 6


def test_a_socket_left_by_another_life_is_replaced(told: Told) -> None:
    again = HttpServer(told.path, told.metrics, told.stager)
    again.start()
    assert told.get("/healthz")[0] == 200
    again.shutdown()
    again.server_close()
