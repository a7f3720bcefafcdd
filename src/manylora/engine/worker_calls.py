"""The engine's adapter memory as the API server reaches it: loads past the step loop, drops in its order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from manylora.engine.load_channel import FAILED, FULL, MEASURE, MISSING, LoadClient, Outcome
from manylora.engine.residency import AdapterLoadFailed, AdapterNotOnDisk, Loaded, MakeRoom
from manylora.errors import ManyloraError, Unavailable


class EngineClient(Protocol):
    """The one method of vLLM's `AsyncLLM` that is used here."""

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:  # noqa: ASYNC109
        """Call `method` on every worker between two steps; one result a worker."""


class WorkerMemory:
    """`AdapterMemory` of `manylora.engine.residency`, over workers."""

    def __init__(self, engine: EngineClient, *, run_dir: Path, timeout_s: float) -> None:
        """`run_dir` is a private folder, in which workers listen."""
        self._engine, self._run_dir, self._timeout_s = engine, run_dir, timeout_s
        self._opening = asyncio.Lock()
        self._clients: list[LoadClient] = []

    async def budget_bytes(self) -> int:
        """How large it is: the smallest worker's counts."""
        return min(int(each["budget_bytes"]) for each in await self._call("manylora_residency"))

    async def measure(self, engine_name: str, folder: Path) -> int:
        """Bytes that a version will take in a worker's memory; its packed form is ready afterwards."""
        outcomes = await self._ask_all(MEASURE, engine_name, folder)
        _check(outcomes)
        return max(outcome.nbytes for outcome in outcomes)

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        """Have every worker bring a version into its memory, beside its steps; all of them, or none keeps it."""
        try:
            outcomes = await self._loaded(lora_id, engine_name, folder, make_room)
            _check(outcomes)
        except (ManyloraError, asyncio.CancelledError):
            with contextlib.suppress(ManyloraError):  # the first error says more
                await self.drop(lora_id)
            raise
        last = max(outcomes, key=lambda outcome: outcome.seconds)
        return Loaded(max(outcome.nbytes for outcome in outcomes), last.seconds, last.source)

    async def connect(self) -> list[LoadClient]:
        """Each worker's end of the channel; they begin to listen with the first call."""
        async with self._opening:
            if not self._clients:
                paths = await self._call("manylora_listen", str(self._run_dir))
                self._clients = [LoadClient(Path(path)) for path in paths]
        return self._clients

    async def close(self) -> None:
        """End the channel."""
        for client in self._clients:
            await client.close()

    async def _loaded(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> list[Outcome]:
        """Each worker's final word; room is made for those that have none, as long as none has failed."""
        words = await self._ask_all(lora_id, engine_name, folder)
        while any(word.state == FULL for word in words) and not any(word.state in _LOST for word in words):
            await make_room()
            full = [worker for worker, word in enumerate(words) if word.state == FULL]
            again = await self._ask_all(lora_id, engine_name, folder, full)
            for worker, word in zip(full, again, strict=True):
                words[worker] = word
        return words

    async def _ask_all(
        self, lora_id: int, engine_name: str, folder: Path, workers: Sequence[int] | None = None
    ) -> list[Outcome]:
        """The word of all workers, or of some."""
        clients = await self.connect()
        asked = clients if workers is None else [clients[worker] for worker in workers]
        try:
            async with asyncio.timeout(self._timeout_s):
                return list(await asyncio.gather(*(each.load(lora_id, engine_name, folder) for each in asked)))
        except TimeoutError:
            raise AdapterLoadFailed(f"reading it took longer than {self._timeout_s:g} s") from None

    async def drop(self, lora_id: int) -> int:
        """Drop an adapter everywhere, once the steps before this have ended; returns the largest number of bytes that a
        worker freed."""
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


_LOST = {FAILED, MISSING}


def _check(outcomes: list[Outcome]) -> None:
    """Raise `AdapterLoadFailed` where a worker failed, or where a module exists on none of them.

    Raises `AdapterNotOnDisk` where one did not find the version: it left the disk tier after the request came.
    """
    if any(outcome.state == MISSING for outcome in outcomes):
        raise AdapterNotOnDisk(next(outcome.reason for outcome in outcomes if outcome.state == MISSING))
    failed = [outcome.reason for outcome in outcomes if outcome.state == FAILED]
    left_out = set.intersection(*(set(outcome.unknown) for outcome in outcomes))
    if failed or left_out:
        raise AdapterLoadFailed(failed[0] if failed else f"no such module in this model: {_some(left_out)}")


def _some(names: set[str], limit: int = 3) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
