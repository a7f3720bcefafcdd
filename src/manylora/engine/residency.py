"""Which adapters are in adapter memory, who uses them, and who must go: the API server's account of one engine.

A request holds a lease from before it enters vLLM until its last byte is out. An adapter under lease is never evicted,
so no step ever needs one that is not there. A load is shared by all that wait for it; a failed one fails only them.
Where all of it is leased, requests wait in the order of their arrival, up to a deadline.

How large an adapter is shows only once it is read: then others leave, least recently used first, until it fits.

Knows neither HTTP nor vLLM: the engine is reached through `AdapterMemory`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manylora.errors import ManyloraError


class AdapterNotOnDisk(ManyloraError):
    """The disk tier has no such version (yet, or any more); fetching it first may help."""


class AdapterLoadFailed(ManyloraError):
    """The version is there but cannot be served; trying again will not help."""


class AdapterMemoryFull(ManyloraError):
    """All adapter memory is held by running requests, and none came free in time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine says of a load."""

    nbytes: int
    seconds: float


MakeRoom = Callable[[], Awaitable[None]]
"""Frees some adapter memory, or waits until some may be free. Raises `AdapterMemoryFull`."""


class AdapterMemory(Protocol):
    """The engine's adapter memory, as the account sees it."""

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        """Bring a version into memory, calling `make_room` as long as it does not fit.

        Raises `AdapterLoadFailed` with a reason a person can act on.
        """

    async def drop(self, lora_id: int) -> int:
        """Drop a version from memory; returns the bytes freed."""


class Observer(Protocol):
    """Told of what happens, for metrics."""

    def loaded(self, seconds: float) -> None: ...
    def load_failed(self) -> None: ...
    def hit(self) -> None: ...
    def evicted(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Resident:
    """One version in adapter memory, or on its way there."""

    engine_name: str
    lora_id: int
    folder: Path
    ready: asyncio.Future[Loaded]
    in_flight: int = 0
    last_used_s: float = 0.0
    leaving: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the load ended well."""
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None


@dataclass(slots=True)
class _Counter:
    """Adapter ids of this engine's life: from 1, never used twice, small enough for vLLM's int32 tables."""

    last: int = 0

    def next(self) -> int:
        self.last += 1
        return self.last


class Residency:
    """The account. Every method runs on one event loop, the API server's."""

    def __init__(
        self,
        tier: AdapterMemory,
        *,
        places: int,
        wait_s: float,
        observer: Observer,
        published: Callable[[Resident, bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`places` versions at most are in memory, whatever their sizes.

        `published(resident, True|False)` tells vLLM's API server which names it may accept, before the first request
        and after the last.
        """
        assert places > 0
        self._tier, self._places, self._wait_s = tier, places, wait_s
        self._observer, self._published, self._clock = observer, published, clock
        self._residents: dict[str, Resident] = {}
        self._counter = _Counter()
        self._loading: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        # Taken while looking for a place: waiters are served in the order in which they came.
        self._turn = asyncio.Lock()

    @property
    def places(self) -> int:
        """How many versions memory may hold at most."""
        return self._places

    def residents(self) -> list[Resident]:
        """A copy of the account, for those who look."""
        return list(self._residents.values())

    @asynccontextmanager
    async def lease(self, engine_name: str, find_folder: Callable[[], Path | None]) -> AsyncIterator[Resident]:
        """Hold a version in memory for the length of the block, loading it first where needed.

        Raises `AdapterNotOnDisk`, `AdapterLoadFailed` or `AdapterMemoryFull`, before the block is entered.
        """
        resident = await self._enter(engine_name, find_folder)
        try:
            await asyncio.shield(resident.ready)
            yield resident
        finally:
            resident.in_flight -= 1
            resident.last_used_s = self._clock()
            self._notify()

    async def _enter(self, engine_name: str, find_folder: Callable[[], Path | None]) -> Resident:
        """The version's entry, counted as in flight; made, and its load begun, where it has none."""
        while True:
            known = self._residents.get(engine_name)
            if known is None:
                await self._admit(engine_name, find_folder)
            elif known.leaving:
                await self._changed()
            else:
                if known.is_ready:
                    self._observer.hit()
                known.in_flight += 1
                return known

    async def _admit(self, engine_name: str, find_folder: Callable[[], Path | None]) -> None:
        """Begin the load of a version once there is a place for it, unless another request has begun it meanwhile."""
        try:
            async with asyncio.timeout(self._wait_s), self._turn:
                while engine_name not in self._residents and len(self._residents) >= self._places:
                    await self._make_room()
                if engine_name not in self._residents:
                    self._begin(engine_name, find_folder)
        except TimeoutError:
            raise AdapterMemoryFull(
                f"all {self._places} adapters in memory are in use by running requests",
                "retry, or start the engine with a larger --max-cpu-loras",
            ) from None

    def _begin(self, engine_name: str, find_folder: Callable[[], Path | None]) -> None:
        folder = find_folder()
        if folder is None:
            raise AdapterNotOnDisk(f"version {engine_name} is not on this node's disk")
        resident = Resident(engine_name, self._counter.next(), folder, asyncio.get_running_loop().create_future())
        self._residents[engine_name] = resident
        task = asyncio.create_task(self._load(resident), name=f"load {engine_name}")
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, resident: Resident) -> None:
        """Load, then let everybody in who waits; on failure the entry goes, and a later request begins anew."""
        try:
            loaded = await self._tier.load(resident.lora_id, resident.engine_name, resident.folder, self._room_maker())
        except Exception as error:  # whatever it was, it belongs to those who wait for this version
            self._observer.load_failed()
            self._remove(resident)
            failure = error if isinstance(error, ManyloraError) else AdapterLoadFailed(f"the load failed: {error}")
            resident.ready.set_exception(failure)
            resident.ready.exception()  # waiters may all have gone; then nobody else would ever look at it
            return
        self._observer.loaded(loaded.seconds)
        self._published(resident, True)
        resident.ready.set_result(loaded)
        self._notify()

    async def _make_room(self) -> None:
        """Evict the least recently used version that nobody holds, or wait until somebody lets go."""
        idle = [r for r in self._residents.values() if r.in_flight == 0 and r.is_ready and not r.leaving]
        if idle:
            await self._drop(min(idle, key=lambda r: r.last_used_s), "lru")
            return
        await self._changed()

    def _room_maker(self) -> MakeRoom:
        """What a load calls while what it read does not fit; within the time that a request may wait."""
        deadline = asyncio.get_running_loop().time() + self._wait_s

        async def make_room() -> None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._make_room()
            except TimeoutError:
                raise AdapterMemoryFull(
                    "all adapter memory is in use by running requests", "retry, or raise --adapter-memory"
                ) from None

        return make_room

    async def evict(self, engine_name: str) -> int | None:
        """Drop a version once no request holds it; returns the bytes freed, None if it was not in memory.

        A request that comes meanwhile is served: whoever wants a version gone closes its door first.
        """
        resident = self._residents.get(engine_name)
        while resident is not None and not resident.leaving and (resident.in_flight or not resident.ready.done()):
            await self._changed()
        if resident is None or self._residents.get(engine_name) is not resident or resident.leaving:
            return None
        return await self._drop(resident, "asked")

    async def _drop(self, resident: Resident, why: str) -> int:
        resident.leaving = True
        self._published(resident, False)
        try:
            freed = await self._tier.drop(resident.lora_id)
        finally:
            self._remove(resident)
        self._observer.evicted(why)
        return freed

    def _remove(self, resident: Resident) -> None:
        if self._residents.get(resident.engine_name) is resident:
            del self._residents[resident.engine_name]
        self._notify()

    async def _changed(self) -> None:
        """Wait until a lease was returned, a load ended or an entry went."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
