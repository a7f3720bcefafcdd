"""What may interrupt a request, and calls that run at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from manylora.gateway.client import ClientGone, run_for_client
from manylora.gateway.drain import Drain
from manylora.gateway.eager import Waiting, run_now
from manylora.gateway.problems import Refusal


async def never() -> Any:
    await asyncio.Event().wait()


async def gone_soon() -> Any:
    await asyncio.sleep(0.05)
    return {"type": "http.disconnect"}


async def test_a_departure_cancels_the_work_and_nothing_else() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await never()
        finally:
            await asyncio.sleep(0)  # the task is not cancelled for ever
            ended = True

    with pytest.raises(ClientGone):
        await run_for_client(work(), gone_soon, Drain())
    task = asyncio.current_task()
    assert ended and task is not None and task.cancelling() == 0
    async with asyncio.timeout(1):
        await asyncio.sleep(0.1)


async def test_the_end_of_the_process_ends_the_work() -> None:
    drain = Drain()
    drain.begin(0.05)
    with pytest.raises(Refusal, match="shutting down"):
        await run_for_client(never(), never, drain)
    with pytest.raises(Refusal, match="shutting down"):
        await run_for_client(never(), never, drain)


async def test_a_cancellation_from_outside_stays_one() -> None:
    running = asyncio.ensure_future(run_for_client(never(), gone_soon, Drain()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_work_that_ends_is_not_disturbed_later() -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)

    await run_for_client(work(), gone_soon, Drain())
    await asyncio.sleep(0.1)


async def test_what_need_not_wait_runs_at_once() -> None:
    async def ready() -> int:
        return 7

    assert run_now(ready()) == 7


async def test_what_waits_goes_on_in_a_task() -> None:
    steps: list[str] = []

    async def slow() -> int:
        steps.append("begun")
        await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            steps.append("timed out")
        return 7

    rest = run_now(slow())
    assert isinstance(rest, Waiting) and steps == ["begun"]
    assert await rest == 7 and steps == ["begun", "timed out"]


async def test_what_waits_can_be_cancelled_and_closed() -> None:
    steps: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            steps.append("ended")

    rest = run_now(slow())
    assert isinstance(rest, Waiting)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await rest
    other = run_now(slow())
    assert isinstance(other, Waiting)
    other.close()
    assert steps == ["ended", "ended"]


async def test_its_errors_are_raised() -> None:
    async def later() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    rest = run_now(later())
    assert isinstance(rest, Waiting)
    with pytest.raises(ZeroDivisionError):
        await rest
