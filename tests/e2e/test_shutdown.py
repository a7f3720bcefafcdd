"""The end: Ctrl-C leaves no process within ten seconds, and not even kill -9 of `manylora serve` leaves one."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness import processes
from harness.asking import ask_all, async_client, question, traffic
from harness.stack import STOP_LIMIT_S, StackHolder
from harness.zoo import BASE, Zoo


async def test_ctrl_c_under_traffic(
    holder: StackHolder, zoo: Zoo, record_figures: Callable[[str, object], None]
) -> None:
    stack = holder.running()
    stack.publish("r4")
    asked = [question(name, prompt) for name in (BASE, "r4") for prompt in zoo.group("short", "long")]
    async with async_client(stack) as client:
        await ask_all(client, asked)
        async with traffic(client, asked, concurrency=4) as log:
            took = stack.stop(STOP_LIMIT_S)
    assert log.wrong == []
    record_figures("ctrl_c_s", round(took, 2))


def test_killed_while_the_engine_starts(holder: StackHolder) -> None:
    """Nobody is left to stop the children in order: they must not outlive their parent."""
    stack = holder.stopped()
    stack.start(wait=False)
    assert stack.server is not None
    deadline = time.monotonic() + 60
    while not stack.by_role(processes.ENGINE_CORE):
        assert time.monotonic() < deadline, stack.log_tail()
        time.sleep(0.2)
    everyone = stack.everyone()
    processes.kill_hard([stack.server.pid])
    stack.server.wait()
    left = processes.wait_gone(everyone, STOP_LIMIT_S)
    processes.kill_hard(left)
    assert not left
    assert stack.everyone() == []
