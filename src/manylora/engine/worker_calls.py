"""The engine's adapter memory, reached from the API server by calls to every worker (`manylora.engine.worker`)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Protocol

from manylora.engine.residency import AdapterLoadFailed, Loaded, MakeRoom
from manylora.errors import ManyloraError, Unavailable

PENDING, FULL, READY, FAILED = "pending", "full", "ready", "failed"
"""States of a read, as a worker tells them."""

_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 0.08


class EngineClient(Protocol):
    """The one method of vLLM's `AsyncLLM` that is used here."""

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        """Call `method` on every worker between two steps; one result a worker."""


class WorkerMemory:
    """`AdapterMemory` of `manylora.engine.residency`, over workers."""

    def __init__(self, engine: EngineClient, *, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        """Have every worker read the folder beside its steps, then take in what was read."""
        await self._call("manylora_prepare", lora_id, engine_name, str(folder))
        try:
            results = await self._registered(lora_id, make_room)
        except (ManyloraError, asyncio.CancelledError):
            await self.drop(lora_id)
            raise
        failed = [result["reason"] for result in results if result["state"] == FAILED]
        left_out = set.intersection(*(set(result.get("unknown", ())) for result in results))
        if failed or left_out:
            await self.drop(lora_id)
            raise AdapterLoadFailed(failed[0] if failed else f"no such module in this model: {_some(left_out)}")
        return Loaded(max(result["bytes"] for result in results), max(result["seconds"] for result in results))

    async def _registered(self, lora_id: int, make_room: MakeRoom) -> list[dict[str, Any]]:
        """Each worker's final word on a read, or only of some once one has failed; room is made as long as one has
        none."""
        pause_s = _FIRST_POLL_S
        final: dict[int, dict[str, Any]] = {}
        started_s = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
            answers = await self._call("manylora_register", lora_id)
            for worker, answer in enumerate(answers):
                if answer["state"] not in {PENDING, FULL}:
                    final.setdefault(worker, answer)
            if len(final) == len(answers):
                return [final[worker] for worker in range(len(answers))]
            if any(result["state"] == FAILED for result in final.values()):
                return list(final.values())
            if any(answer["state"] == FULL for answer in answers):
                await make_room()
                pause_s = _FIRST_POLL_S
            elif time.monotonic() - started_s > self._timeout_s:
                raise AdapterLoadFailed(f"reading it took longer than {self._timeout_s:g} s")

    async def drop(self, lora_id: int) -> int:
        """Drop an adapter everywhere; returns the largest number of bytes that a worker freed."""
        return max(await self._call("manylora_forget", lora_id))

    async def residency(self) -> dict[str, Any]:
        """What the first worker says of its adapter memory; all workers hold the same adapters."""
        first: dict[str, Any] = (await self._call("manylora_residency"))[0]
        return first

    async def _call(self, method: str, *args: Any) -> list[Any]:
        try:
            return list(await self._engine.collective_rpc(method, self._timeout_s, args))
        except Exception as error:  # vLLM raises its own errors when the engine has died or does not answer
            raise Unavailable(f"the engine did not answer {method}: {type(error).__name__}") from error


def _some(names: set[str], limit: int = 3) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
