"""The supervisor as a whole, over fake children, as a process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MACHINE = Path(__file__).with_name("fake_machine.py")
LIMIT_S = 30.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


class Machine:
    def __init__(self, folder: Path, engine: str, gateway: str, **limits: float) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(MACHINE), str(folder), str(free_port()), engine, gateway],
            stdout=subprocess.PIPE,
            env={**os.environ, **{name.upper(): str(value) for name, value in limits.items()}},
            text=True,
            start_new_session=True,
        )
        self.events: list[dict[str, Any]] = []

    def until(self, event: str, **facts: object) -> dict[str, Any]:
        """Read events up to one that has these facts."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event and facts.items() <= self.events[-1].items():
                return self.events[-1]
        raise AssertionError(f"no {event} among {self.events}")

    def pids(self, child: str) -> list[int]:
        file = self.folder / f"{child}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def all_pids(self) -> list[int]:
        return self.pids("engine") + self.pids("gateway") + self.guards()

    def guards(self) -> list[int]:
        """Guards of this machine, living: found by their parent."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in task.read_text().split()] if task.exists() else []

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


Start = Callable[..., Machine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    machines: list[Machine] = []

    def begin(engine: str = "", gateway: str = "", **limits: float) -> Machine:
        machines.append(Machine(tmp_path / "run", engine, gateway, **limits))
        return machines[-1]

    yield begin
    for machine in machines:
        left = [pid for pid in machine.all_pids() if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if machine.process.poll() is None:
            machine.process.kill()
        machine.end()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_a_signal_stops_everything_in_order(start: Start, number: signal.Signals, status: int) -> None:
    machine = start()
    machine.until("ready", url="http://here")
    pids = machine.all_pids()
    machine.process.send_signal(number)
    machine.until("stopping")
    assert machine.end() == status
    assert not [pid for pid in pids if is_alive(pid)]


def test_progress_shows_the_engines_last_line(start: Start) -> None:
    machine = start("--start-after 1")
    machine.until("waiting", line="Loading the weights")


@pytest.mark.parametrize("child", ["engine", "gateway"])
def test_a_child_that_is_killed_is_started_again_and_the_other_stays(start: Start, child: str) -> None:
    other = "gateway" if child == "engine" else "engine"
    machine = start()
    machine.until("ready")
    for times in (1, 2):
        os.kill(machine.pids(child)[-1], signal.SIGKILL)
        died = machine.until("died", child=child)
        assert died["how"] == "was ended by signal 9"
        assert died["retry_in_s"] == pytest.approx(0.1 * times)
        machine.until("back", child=child)
    assert len(machine.pids(child)) == 3
    assert len(machine.pids(other)) == 1
    assert is_alive(machine.pids(other)[0])


def test_what_a_killed_engine_leaves_is_ended_before_the_restart(start: Start) -> None:
    machine = start("--grandchildren")
    machine.until("ready")
    first = machine.pids("engine")
    assert len(first) == 4
    os.kill(first[0], signal.SIGKILL)
    machine.until("died", child="engine")
    assert not [pid for pid in first if is_alive(pid)]
    machine.until("back", child="engine")


def test_a_killed_guard_takes_its_child_along_and_strays_are_ended(start: Start) -> None:
    machine = start("--grandchildren")
    machine.until("ready")
    engine, gateway = machine.pids("engine"), machine.pids("gateway")
    guard = int(Path(f"/proc/{engine[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGKILL)
    machine.until("died", child="engine")
    assert not [pid for pid in engine if is_alive(pid)]
    machine.until("back", child="engine")
    assert is_alive(gateway[0])


def test_an_engine_that_fails_its_first_start_ends_the_machine_with_its_last_lines(start: Start) -> None:
    machine = start("--exit 2 --say 'api.py: error: unrecognized arguments: --maxx'")
    failed = machine.until("failed")
    assert failed["message"] == (
        "the engine ended with exit code 2 while it was starting: api.py: error: unrecognized arguments: --maxx"
    )
    assert "vllm serve --help" in failed["hint"]
    assert failed["lines"] == ["api.py: error: unrecognized arguments: --maxx"]
    gateway = machine.pids("gateway")
    assert machine.end() == 6
    assert not [pid for pid in gateway if is_alive(pid)]


def test_a_gateway_that_fails_its_first_start_stops_the_engine(start: Start) -> None:
    machine = start("--start-after 60", "--exit 1 --say 'address already in use'")
    failed = machine.until("failed")
    assert failed["message"].startswith("the gateway ended")
    assert machine.end() == 6
    assert not [pid for pid in machine.pids("engine") if is_alive(pid)]


def test_a_hanging_child_is_killed_and_started_again(start: Start, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    machine = start(f"--sick-file {sick}")
    machine.until("ready")
    sick.touch()
    machine.until("hanging", child="engine")
    sick.unlink()
    machine.until("back", child="engine")


def test_stubborn_children_are_killed_after_their_grace(start: Start) -> None:
    machine = start("--stubborn --grandchildren", "--stubborn")
    machine.until("ready")
    pids = machine.all_pids()
    begun_s = time.monotonic()
    machine.process.send_signal(signal.SIGINT)
    assert machine.end() == 130
    assert time.monotonic() - begun_s < 10
    assert not [pid for pid in pids if is_alive(pid)]


def test_the_stop_as_a_whole_has_a_limit(start: Start) -> None:
    machine = start("--stubborn --grandchildren", "--stubborn", grace_s=60, stop_limit_s=1)
    machine.until("ready")
    pids = machine.all_pids()
    machine.process.send_signal(signal.SIGTERM)
    assert machine.end() == 0
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_second_interrupt_kills_at_once(start: Start) -> None:
    machine = start("--stubborn --grandchildren", "--stubborn", grace_s=60)
    machine.until("ready")
    pids = machine.all_pids()
    machine.process.send_signal(signal.SIGINT)
    machine.until("stopping")
    begun_s = time.monotonic()
    machine.process.send_signal(signal.SIGINT)
    assert machine.end() == 130
    assert time.monotonic() - begun_s < 6
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_stop_during_the_start(start: Start) -> None:
    machine = start("--start-after 60")
    machine.until("waiting")
    assert eventually(lambda: len(machine.pids("engine")) == 1)
    machine.process.send_signal(signal.SIGTERM)
    assert machine.end() == 0
    assert not [pid for pid in machine.all_pids() if is_alive(pid)]


@pytest.mark.parametrize("flags", ["", "--stubborn --grandchildren"])
def test_kill_9_of_the_supervisor_leaves_no_process(start: Start, flags: str) -> None:
    machine = start(flags, flags.replace("--grandchildren", ""))
    machine.until("ready")
    pids = machine.all_pids()
    assert len(machine.guards()) == 2
    machine.process.kill()
    machine.end()
    assert eventually(lambda: not [pid for pid in pids if is_alive(pid)], 10)


def test_a_new_supervisor_waits_for_the_last_processes_of_a_killed_one(start: Start) -> None:
    first = start("--stubborn")
    first.until("ready")
    pids = first.all_pids()
    first.process.kill()
    first.end()
    second = start()
    second.until("ready")
    assert not [pid for pid in pids if is_alive(pid)]


def test_two_supervisors_of_one_folder(start: Start) -> None:
    first = start()
    first.until("ready")
    failed = start().until("failed")
    assert f"pid {first.process.pid}" in failed["message"]
    assert "--home" in failed["hint"]
