"""The agent's socket, and a worker's client on it: leases end with connections, and an agent may die at any time."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from agent_node import (  # noqa: E402
    EXACT_LAYOUT,
    LAYOUTS,
    PAGED_LAYOUT,
    Node,
    check_invariants,
    eventually,
    payload,
    settle,
)
from peft_folders import LAYER, factors, publish  # noqa: E402

from manylora.agent import stager as stager_module  # noqa: E402
from manylora.agent.server import AgentServer  # noqa: E402
from manylora.agent.stager import FOLDER, HOST, PACKED, Stager  # noqa: E402
from manylora.engine import agent_client  # noqa: E402
from manylora.engine.agent_client import AgentClient  # noqa: E402
from manylora.errors import CorruptBlob, InvalidAdapter, NotFound, Unavailable  # noqa: E402
from manylora.staging import protocol  # noqa: E402
from manylora.staging.folder import read_folder  # noqa: E402
from manylora.staging.packed_form import block_bytes, copy_block, read_header  # noqa: E402
from manylora.staging.protocol import Answer, Hello, Line, Refused, Release, Stage, Staged, Welcome  # noqa: E402


class Agent:
    """A server in this process."""

    def __init__(self, node: Node, path: Path, size_bytes: int = 1 << 20) -> None:
        self.node, self.path = node, path
        self.stager: Stager = node.stager(size_bytes)
        self.server = AgentServer(path, self.stager)
        self.server.start()

    def leases(self) -> int:
        settle(self.stager)
        return sum(block.leases for block in self.stager.blocks())

    def connect(self) -> Line:
        """A worker's connection, greeted."""
        line = self.raw()
        line.send(Hello(EXACT_LAYOUT))
        assert isinstance(line.receive(Answer), Welcome)
        return line

    def raw(self) -> Line:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        connection.connect(str(self.path))
        return Line(connection)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "disk")


@pytest.fixture
def make(node: Node, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def make(size_bytes: int = 1 << 20) -> Agent:
        agents.append(Agent(node, tmp_path / "agent.sock", size_bytes))
        return agents[-1]

    yield make
    for agent in agents:
        agent.server.close()
        agent.stager.close()


@pytest.fixture
def agent(make: Callable[..., Agent]) -> Agent:
    return make()


def stage(line: Line, digest: str) -> Any:
    line.send(Stage(digest))
    return line.receive(Answer)


# ---- the socket ----


def test_only_this_user_may_connect(agent: Agent) -> None:
    assert agent.path.stat().st_mode & 0o777 == 0o600


def test_a_staged_block_is_the_versions_in_the_memory_that_came_with_the_welcome(agent: Agent, node: Node) -> None:
    digest = node.publish()
    line = agent.raw()
    line.send(Hello(EXACT_LAYOUT))
    welcome = line.receive(Answer)
    descriptor = line.take_descriptor()
    assert isinstance(welcome, Welcome)
    assert descriptor is not None
    memory = mmap.mmap(descriptor, welcome.memory_bytes)
    os.close(descriptor)
    staged = stage(line, digest)
    assert isinstance(staged, Staged)
    assert staged.source == FOLDER
    assert staged.seconds > 0
    block = memoryview(memory)[staged.offset : staged.offset + staged.nbytes]
    assert payload(block, digest) == node.expected(digest)
    assert block_bytes(read_header(block)) == staged.nbytes
    line.send(Release(staged.offset))
    eventually(lambda: agent.leases() == 0)
    line.close()


def test_leases_end_with_the_connection(agent: Agent, node: Node) -> None:
    digests = [node.publish() for _ in range(3)]
    lines = [agent.connect() for _ in range(2)]
    for line in lines:
        for digest in digests:
            assert isinstance(stage(line, digest), Staged)
    assert agent.leases() == 6
    lines[0].close()
    eventually(lambda: agent.leases() == 3)
    lines[1].close()
    eventually(lambda: agent.leases() == 0)
    check_invariants(agent.stager)


def test_one_connection_holds_one_lease_of_a_version(agent: Agent, node: Node) -> None:
    digest = node.publish()
    line, other = agent.connect(), agent.connect()
    staged = [stage(line, digest) for _ in range(3)]
    assert len({each.offset for each in staged}) == 1
    assert agent.leases() == 1
    theirs = stage(other, digest)
    line.send(Release(staged[0].offset))
    eventually(lambda: agent.leases() == 1)
    other.send(Release(theirs.offset))
    eventually(lambda: agent.leases() == 0)
    for each in (line, other):
        each.close()


def test_nobody_releases_what_another_holds(agent: Agent, node: Node) -> None:
    digest = node.publish()
    line, other = agent.connect(), agent.connect()
    staged = stage(line, digest)
    other.send(Release(staged.offset))
    assert other.receive(Answer) is None
    assert agent.leases() == 1
    for each in (line, other):
        each.close()


def test_a_connection_that_ends_while_its_version_is_staged_leaves_no_lease(
    agent: Agent, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = node.publish()
    inside, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return read_folder(*args)

    monkeypatch.setattr(stager_module, "read_folder", slow)
    line = agent.connect()
    line.send(Stage(digest))
    assert inside.wait(30)
    line.close()
    go_on.set()
    eventually(lambda: len(agent.stager.blocks()) == 1 and agent.leases() == 0)
    check_invariants(agent.stager)


def test_a_refusal_ends_neither_the_connection_nor_its_leases(agent: Agent, node: Node) -> None:
    sound, bad = node.publish(), publish(node.root, factors(f"{LAYER}.self_attn.o_proj", 8, 23, 20))
    line = agent.connect()
    staged = stage(line, sound)
    for digest, kind in ((bad, "InvalidAdapter"), ("0" * 64, "NotFound"), ("../x", "Unavailable")):
        refused = stage(line, digest)
        assert isinstance(refused, Refused)
        assert refused.kind == kind
    assert agent.leases() == 1
    again = stage(line, sound)
    assert (again.offset, again.nbytes, again.source) == (staged.offset, staged.nbytes, HOST)
    line.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\x00\xff\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"type":"Stage"}\n',
        b'{"type":"Release","offset":4096}\n',
        b'{"type":"Stage","digest":"x","more":' + b"[" * 60_000 + b"\n",
        msgspec.json.encode(Hello(EXACT_LAYOUT)) * 2 + b"\n",
        b'{"type":"St',
    ],
    ids=lambda garbage: garbage[:24].decode(errors="replace"),
)
@pytest.mark.parametrize("greeted", [True, False])
def test_garbage_ends_its_own_connection_only(agent: Agent, node: Node, garbage: bytes, greeted: bool) -> None:
    digest = node.publish()
    other = agent.connect()
    assert isinstance(stage(other, digest), Staged)
    line = agent.connect() if greeted else agent.raw()
    if greeted:
        stage(line, digest)
        assert agent.leases() == 2
    line._socket.sendall(garbage)
    line._socket.shutdown(socket.SHUT_WR)
    assert line.receive(Answer) is None
    line.close()
    eventually(lambda: agent.leases() == 1)
    assert stage(other, digest).source == HOST
    other.close()


def test_nobody_says_hello_twice(agent: Agent) -> None:
    line = agent.connect()
    line.send(Hello(PAGED_LAYOUT))
    assert line.receive(Answer) is None
    line.close()


def test_lines_that_never_end_end_their_connection(agent: Agent, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 1 << 16)
    line = agent.raw()
    with contextlib.suppress(OSError):
        for _ in range(1000):
            line._socket.sendall(b" " * 65536)
    line.close()
    with contextlib.closing(agent.connect()) as other:
        assert isinstance(stage(other, node.publish()), Staged)


def test_an_agent_out_of_descriptors_accepts_again_later(
    agent: Agent, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listening:
        """Fails as `accept` does, a few times."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.failures = real, 3

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    listening = Listening(agent.server._socket)
    monkeypatch.setattr(agent.server, "_socket", listening)
    for _ in range(2):
        agent.connect().close()
    eventually(lambda: listening.failures == 0)
    with contextlib.closing(agent.connect()) as line:
        assert isinstance(stage(line, node.publish()), Staged)


# ---- a worker's client ----


@pytest.mark.parametrize("engine", LAYOUTS, ids=["exact", "paged"])
def test_a_client_sees_what_was_staged(agent: Agent, node: Node, engine: Any) -> None:
    digest = node.publish(wide=True)
    client = AgentClient(agent.path, engine)
    for source in (FOLDER, HOST):
        with client.staged(digest) as staged:
            assert staged.source == source
            assert staged.header == read_header(staged.block)
            assert payload(staged.block, digest, engine) == node.expected(digest, engine)
            assert agent.leases() == 1
        eventually(lambda: agent.leases() == 0)
    client.close()


def test_refusals_are_raised_and_the_connection_goes_on(agent: Agent, node: Node) -> None:
    bad = publish(node.root, factors(f"{LAYER}.self_attn.o_proj", 513, 24, 20))
    client = AgentClient(agent.path, EXACT_LAYOUT)
    with pytest.raises(InvalidAdapter, match="rank 513") as caught, client.staged(bad):
        pass
    assert "--max-lora-rank" in caught.value.hint
    with pytest.raises(NotFound), client.staged("0" * 64):
        pass
    with client.staged(node.publish()):
        pass
    assert len(client._idle) == 1
    client.close()


def test_an_error_within_returns_the_lease(agent: Agent, node: Node) -> None:
    digest = node.publish()
    client = AgentClient(agent.path, EXACT_LAYOUT)
    with pytest.raises(ZeroDivisionError), client.staged(digest):
        raise ZeroDivisionError
    eventually(lambda: agent.leases() == 0)
    with client.staged(digest):
        assert agent.leases() == 1
    client.close()


def test_memory_that_became_anothers_is_told(agent: Agent, node: Node) -> None:
    digest, other = node.publish(), node.publish()
    client = AgentClient(agent.path, EXACT_LAYOUT)
    for change in (lambda block: block.__setitem__(slice(0, 4096), bytes(4096)), None):
        with pytest.raises(CorruptBlob), client.staged(digest) as staged:
            if change is not None:
                change(staged.block)
            else:
                with client.staged(other) as theirs:
                    staged.block[: len(theirs.block)] = theirs.block
        agent.stager.drop(digest)
    eventually(lambda: agent.leases() == 0)
    client.close()


def test_a_block_lost_by_the_agent_while_it_is_copied_is_told(agent: Agent, node: Node) -> None:
    """Should a connection end under a worker that copies, its block is no block any more."""
    digest = node.publish()
    client = AgentClient(agent.path, EXACT_LAYOUT)
    client.warm()
    (connection,) = client._idle
    with pytest.raises(CorruptBlob), client.staged(digest) as staged:
        copy_block(staged.block)
        connection.line._socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: agent.leases() == 0)
        agent.stager.drop(digest)
    check_invariants(agent.stager)
    client.close()


def test_a_connection_that_ends_after_the_copy_harms_nobody(agent: Agent, node: Node) -> None:
    digest = node.publish()
    client = AgentClient(agent.path, EXACT_LAYOUT)
    client.warm()
    (connection,) = client._idle
    with client.staged(digest):
        connection.line._socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: agent.leases() == 0)
    with client.staged(digest) as staged:
        assert payload(staged.block, digest) == node.expected(digest)
    client.close()


def test_a_client_maps_an_agents_memory_once(agent: Agent, node: Node) -> None:
    digests = [node.publish() for _ in range(6)]
    mapped: list[mmap.mmap] = []
    client = AgentClient(agent.path, EXACT_LAYOUT, mapped.append)
    client.warm()
    with ThreadPoolExecutor(6) as threads:
        together = threading.Barrier(6)

        def load(digest: str) -> bytes:
            with client.staged(digest) as staged:
                together.wait(30)
                return payload(staged.block, digest)

        found = list(threads.map(load, digests))
    assert found == [node.expected(digest) for digest in digests]
    assert len(mapped) == 1
    assert len(mapped[0]) == agent.stager.arena.size_bytes
    client.close()


def test_memory_that_cannot_be_pinned_is_used_all_the_same(agent: Agent, node: Node) -> None:
    def fail(memory: mmap.mmap) -> None:
        raise RuntimeError("no device")

    digest = node.publish()
    client = AgentClient(agent.path, EXACT_LAYOUT, fail)
    with client.staged(digest) as staged:
        assert payload(staged.block, digest) == node.expected(digest)
    client.close()


def test_full_memory_is_unavailable(make: Callable[..., Agent], node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager_module, "WAIT_S", 0.1)
    first, second = node.publish(), node.publish()
    agent = make(node.nbytes(first))
    client = AgentClient(agent.path, EXACT_LAYOUT)
    with client.staged(first), pytest.raises(Unavailable, match="in use by loads"), client.staged(second):
        pass
    with client.staged(second):
        pass
    client.close()


def test_no_agent_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "RECONNECT_S", 0.2)
    client = AgentClient(tmp_path / "nobody.sock", EXACT_LAYOUT)
    with pytest.raises(Unavailable, match="does not answer"):
        client.warm()
    with pytest.raises(Unavailable, match="does not answer"), client.staged("0" * 64):
        pass


def test_an_agent_that_answers_nothing_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "RECONNECT_S", 0.2)
    monkeypatch.setattr(agent_client, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "silent.sock"))
        listening.listen(64)
        client = AgentClient(tmp_path / "silent.sock", EXACT_LAYOUT)
        with pytest.raises(Unavailable), client.staged("0" * 64):
            pass


@pytest.mark.parametrize("answer", [b"", b"garbage\n", msgspec.json.encode(Refused("NotFound", "x")) + b"\n"])
def test_a_stranger_on_the_socket_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(agent_client, "RECONNECT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "odd.sock"))
        listening.listen(64)
        met = 0

        def accept() -> None:
            nonlocal met
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    met += 1
                    with connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        client = AgentClient(tmp_path / "odd.sock", EXACT_LAYOUT)
        with pytest.raises(Unavailable), client.staged("0" * 64):
            pass
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert met < 50, "it asks without a pause"


# ---- an agent that dies ----


class Process:
    """`python -m manylora.agent` on a node's disk."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.path, self.http_path = folder / "a.sock", folder / "h.sock"
        environment = {
            **os.environ,
            "MANYLORA_HOME": str(folder),
            "MANYLORA_DISK_TIER": str(node.root),
            "MANYLORA_HOST_MEMORY": "4MiB",
        }
        command = [sys.executable, "-m", "manylora.agent", "--socket", str(self.path)]
        self.process = subprocess.Popen([*command, "--http-socket", str(self.http_path)], env=environment)

    def ready(self) -> Process:
        eventually(lambda: answers(self.path) and answers(self.http_path), 60)
        return self

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def test_an_agent_killed_under_a_worker(node: Node, tmp_path: Path) -> None:
    """What a worker copies stays as it was; its next load finds the new agent, and what that one packed before."""
    first, second = node.publish(wide=True), node.publish(wide=True)
    expected = {digest: node.expected(digest, PAGED_LAYOUT) for digest in (first, second)}
    process = Process(node, tmp_path).ready()
    mapped: list[mmap.mmap] = []
    client = AgentClient(process.path, PAGED_LAYOUT, mapped.append)
    anew: Process | None = None
    try:
        with client.staged(second) as staged:
            assert (staged.source, payload(staged.block, second, PAGED_LAYOUT)) == (FOLDER, expected[second])
        with client.staged(first) as staged:
            eventually(lambda: all(node.packed_file(digest, PAGED_LAYOUT).exists() for digest in (first, second)))
            left = node.packed_file(first, PAGED_LAYOUT).with_name(".partial-00")
            left.write_bytes(b"half")
            process.kill()
            anew = Process(node, tmp_path)
            with client.staged(second) as other:
                assert (other.source, payload(other.block, second, PAGED_LAYOUT)) == (PACKED, expected[second])
                assert payload(staged.block, first, PAGED_LAYOUT) == expected[first]
        assert not left.exists()
        with client.staged(first) as staged:
            assert (staged.source, payload(staged.block, first, PAGED_LAYOUT)) == (PACKED, expected[first])
        assert len(mapped) == 2
    finally:
        client.close()
        for each in (process, anew):
            if each is not None:
                each.kill()


def test_a_worker_that_is_killed_leaves_no_lease(agent: Agent, node: Node) -> None:
    digest = node.publish()
    program = (
        "import os, signal, sys, pathlib, msgspec\n"
        "from manylora.engine.agent_client import AgentClient\n"
        "from manylora.staging.layout import EngineLayout\n"
        "layout = msgspec.json.decode(sys.argv[3], type=EngineLayout)\n"
        "with AgentClient(pathlib.Path(sys.argv[1]), layout).staged(sys.argv[2]):\n"
        "    print('held', flush=True); signal.pause()\n"
    )
    layout = msgspec.json.encode(EXACT_LAYOUT).decode()
    command = [sys.executable, "-c", program, str(agent.path), digest, layout]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "held\n"
        assert agent.leases() == 1
        worker.kill()
    eventually(lambda: agent.leases() == 0)


def test_many_clients_at_once_see_only_their_own(make: Callable[..., Agent], node: Node) -> None:
    digests = [node.publish() for _ in range(6)]
    expected = {digest: node.expected(digest) for digest in digests}
    agent = make(4 * node.nbytes(digests[0]))
    client = AgentClient(agent.path, EXACT_LAYOUT)
    stop_s = time.monotonic() + 1.0

    def work(number: int) -> int:
        done = 0
        while time.monotonic() < stop_s:
            digest = digests[(number + done) % len(digests)]
            with client.staged(digest) as staged:
                assert payload(staged.block, digest) == expected[digest]
            done += 1
        return done

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))
    eventually(lambda: agent.leases() == 0)
    check_invariants(agent.stager)
    assert agent.stager.evictions > 0
    client.close()
