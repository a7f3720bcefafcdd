"""Which adapters are in adapter memory, who uses them, and who must go: the API server's account of one engine.

A request holds a lease from before it enters vLLM until its last byte is out. An adapter under lease is never evicted,
so no step ever needs one that is not there. Who gets in, who waits and who leaves is decided by
`manylora.tiers.admission`; this file asks it, and does what it says: measure, drop, load, tell.

A version that is new here is measured first, which brings its packed form to the node's host memory: a request waits
for that without a place in adapter memory. A load is shared by all that wait for it; a failed one fails only them.

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
from manylora.tiers.admission import Admission, Hit, Load, TooLarge, Wait
from manylora.tiers.eviction import DEFAULT_POLICY, POLICIES, Entry

LOAD_S = 0.01
"""About what a load from host memory takes; policies that weigh costs are told."""


REMEMBERED = 65536
"""Versions whose sizes and folders are kept."""


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
    source: str
    """The tier it came from."""


MakeRoom = Callable[[], Awaitable[None]]
"""Frees some adapter memory, or waits until some may be free. Raises `AdapterMemoryFull`."""


class AdapterMemory(Protocol):
    """The engine's adapter memory, as the account sees it."""

    async def budget_bytes(self) -> int:
        """How large it is."""

    async def measure(self, engine_name: str, folder: Path) -> int:
        """Bytes that a version will take in it. Raises `AdapterLoadFailed` with a reason a person can act on."""

    async def load(self, lora_id: int, engine_name: str, folder: Path, make_room: MakeRoom) -> Loaded:
        """Bring a version into memory, calling `make_room` as long as it does not fit.

        Raises `AdapterLoadFailed` with a reason a person can act on.
        """

    async def drop(self, lora_id: int) -> int:
        """Drop a version from memory; returns the bytes freed."""


class Observer(Protocol):
    """Told of what happens, for metrics."""

    def loaded(self, seconds: float, source: str) -> None: ...
    def load_failed(self) -> None: ...
    def hit(self) -> None: ...
    def evicted(self, reason: str) -> None: ...
    def waited(self, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class Resident:
    """One version in adapter memory, or on its way there."""

    engine_name: str
    lora_id: int
    folder: Path
    ready: asyncio.Future[Loaded]
    in_flight: int = 0

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


class _Request:
    """One request; what `Admission` knows it by."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in line."""

    folder: Path
    go: asyncio.Future[Resident]


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
        policy: str = DEFAULT_POLICY,
    ) -> None:
        """`places` versions at most are in memory, whatever their sizes.

        `published(resident, True|False)` tells vLLM's API server which names it may accept, before the first request
        and after the last.
        """
        assert places > 0
        self._tier, self._places, self._wait_s = tier, places, wait_s
        self._observer, self._published, self._clock = observer, published, clock
        self._policy = policy
        self._admission: Admission | None = None
        self._opening = asyncio.Lock()
        self._residents: dict[str, Resident] = {}
        self._counter = _Counter()
        self._sizes: dict[str, int] = {}
        self._folders: dict[str, Path] = {}
        self._measuring: dict[str, asyncio.Task[int]] = {}
        self._waiting: dict[_Request, _Waiting] = {}
        self._out: set[_Request] = set()
        self._loading: set[asyncio.Task[None]] = set()
        self._dropping: set[asyncio.Task[int]] = set()
        self._changes: list[asyncio.Future[None]] = []

    @property
    def places(self) -> int:
        """How many versions memory may hold at most."""
        return self._places

    def residents(self) -> list[Resident]:
        """A copy of the account, for those who look."""
        return list(self._residents.values())

    def waiting(self) -> int:
        """How many requests wait for memory."""
        return len(self._waiting)

    @asynccontextmanager
    async def lease(self, engine_name: str, find_folder: Callable[[], Path | None]) -> AsyncIterator[Resident]:
        """Hold a version in memory for the length of the block, loading it first where needed.

        Raises `AdapterNotOnDisk`, `AdapterLoadFailed` or `AdapterMemoryFull`, before the block is entered.
        """
        request = _Request()
        began_s = self._clock()
        resident = await self._enter(request, engine_name, find_folder)
        resident.in_flight += 1
        try:
            if resident.is_ready:
                self._observer.hit()
            else:
                await asyncio.shield(resident.ready)
            self._observer.waited(self._clock() - began_s)
            yield resident
        finally:
            resident.in_flight -= 1
            self._leave(request)

    async def _enter(self, request: _Request, engine_name: str, find_folder: Callable[[], Path | None]) -> Resident:
        """The version's entry, with this request's pin on it; its load has begun at least."""
        admission = await self._account()
        folder = self._folder(engine_name, find_folder)
        size_bytes = self._sizes.get(engine_name) or await self._size(engine_name, folder)
        try:
            decision = admission.ask(request, Entry(engine_name, size_bytes, LOAD_S), self._clock())
        except TooLarge as error:
            raise AdapterLoadFailed(error.message, error.hint) from error
        if isinstance(decision, Wait):
            return await self._in_line(request, folder)
        waiting = _Waiting(folder, asyncio.get_running_loop().create_future())
        self._waiting[request] = waiting
        self._obey(decision)
        return waiting.go.result()

    def _folder(self, engine_name: str, find_folder: Callable[[], Path | None]) -> Path:
        """Where a version lies. Looking for it means to read a folder of thousands, so what was found is remembered."""
        known = self._residents.get(engine_name)
        if known is not None:
            return known.folder
        folder = self._folders.get(engine_name)
        if folder is None or not folder.is_dir():
            folder = find_folder()
        if folder is None:
            raise AdapterNotOnDisk(f"version {engine_name} is not on this node's disk")
        if len(self._folders) >= REMEMBERED:
            self._folders.clear()
        self._folders[engine_name] = folder
        return folder

    async def _account(self) -> Admission:
        async with self._opening:
            if self._admission is None:
                self._admission = Admission(POLICIES[self._policy](), await self._tier.budget_bytes())
        return self._admission

    async def _size(self, engine_name: str, folder: Path) -> int:
        """What a version takes of the budget: its bytes, and at least one place's share. Found out once."""
        task = self._measuring.get(engine_name)
        if task is None:
            task = self._measuring[engine_name] = asyncio.create_task(self._measure(engine_name, folder))
            task.add_done_callback(lambda done: self._measured(engine_name, done))
        return await asyncio.shield(task)

    async def _measure(self, engine_name: str, folder: Path) -> int:
        try:
            nbytes = await self._tier.measure(engine_name, folder)
        except Exception as error:  # whatever it was, it belongs to those who wait for this version
            self._observer.load_failed()
            raise (
                error if isinstance(error, ManyloraError) else AdapterLoadFailed(f"the load failed: {error}")
            ) from error
        admission = await self._account()
        # An adapter larger than all memory is told so in its own bytes.
        return max(nbytes, admission.budget_bytes // self._places)

    def _measured(self, engine_name: str, task: asyncio.Task[int]) -> None:
        del self._measuring[engine_name]
        if not task.cancelled() and task.exception() is None:
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            self._sizes[engine_name] = task.result()

    async def _in_line(self, request: _Request, folder: Path) -> Resident:
        """Wait until others have gone, up to a deadline."""
        waiting = self._waiting[request] = _Waiting(folder, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._wait_s):
                self._wake_later()
                return await asyncio.shield(waiting.go)
        except BaseException as error:
            if waiting.go.done():  # let in at the last moment
                self._leave(request)
            else:
                del self._waiting[request]
                self._release(request)
            if isinstance(error, TimeoutError):
                raise AdapterMemoryFull(
                    "all adapter memory is in use by running requests",
                    f"retry, or raise --adapter-memory (and --max-cpu-loras, now {self._places})",
                ) from None
            raise

    def _wake_later(self) -> None:
        """Look again once the eldest has lost its patience: from then on adapters are drained for it."""
        assert self._admission is not None
        asyncio.get_running_loop().call_later(self._admission.patience_s, self._wake)

    # ---- what the admission decides ----

    def _obey(self, decision: Hit | Load) -> None:
        """Let requests in, and begin the load that they need."""
        if isinstance(decision, Load):
            for name in decision.evict:
                self._drop_soon(self._residents[name], "room")
            folder = self._waiting[decision.requests[0]].folder  # type: ignore[index]
            self._begin(decision.key, folder)
        resident = self._residents[decision.key]
        for request in decision.requests:
            assert isinstance(request, _Request)
            self._waiting.pop(request).go.set_result(resident)

    def _wake(self) -> None:
        assert self._admission is not None
        for decision in self._admission.wake(self._clock()):
            self._obey(decision)
        changes, self._changes = self._changes, []
        for future in changes:
            if not future.done():
                future.set_result(None)

    def _leave(self, request: _Request) -> None:
        """A request that was let in has ended."""
        if request in self._out:  # its load failed: the account has forgotten it
            self._out.remove(request)
        else:
            self._release(request)

    def _release(self, request: _Request) -> None:
        assert self._admission is not None
        self._admission.release(request)
        self._wake()

    # ---- loads ----

    def _begin(self, engine_name: str, folder: Path) -> None:
        resident = Resident(engine_name, self._counter.next(), folder, asyncio.get_running_loop().create_future())
        self._residents[engine_name] = resident
        task = asyncio.create_task(self._load(resident), name=f"load {engine_name}")
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, resident: Resident) -> None:
        """Load, then let everybody in who waits; on failure the entry goes, and a later request begins anew."""
        assert self._admission is not None
        try:
            # The room that was decided on is there once those who leave have gone.
            await asyncio.gather(*self._dropping, return_exceptions=True)
            loaded = await self._tier.load(resident.lora_id, resident.engine_name, resident.folder, self._room_maker())
        except Exception as error:  # whatever it was, it belongs to those who wait for this version
            self._observer.load_failed()
            del self._residents[resident.engine_name]
            self._sizes.pop(resident.engine_name, None)
            self._out.update(self._admission.failed(resident.engine_name))  # type: ignore[arg-type]
            failure = error if isinstance(error, ManyloraError) else AdapterLoadFailed(f"the load failed: {error}")
            resident.ready.set_exception(failure)
            resident.ready.exception()  # waiters may all have gone; then nobody else would ever look at it
            self._wake()
            return
        self._observer.loaded(loaded.seconds, loaded.source)
        self._published(resident, True)
        resident.ready.set_result(loaded)
        self._admission.loaded(resident.engine_name)
        self._wake()

    def _room_maker(self) -> MakeRoom:
        """What a load calls while what it brings does not fit although the account has room for it: tables may be
        fragmented. Within the time that a request may wait."""
        deadline = asyncio.get_running_loop().time() + self._wait_s

        async def make_room() -> None:
            assert self._admission is not None
            try:
                async with asyncio.timeout_at(deadline):
                    for resident in self.residents():
                        if self._admission.drop(resident.engine_name):
                            await self._drop_soon(resident, "room")
                            return
                    await self._changed()
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
        while resident is not None and self._residents.get(engine_name) is resident:
            assert self._admission is not None
            if self._admission.drop(engine_name):
                return await self._drop_soon(resident, "asked")
            await self._changed()
        return None

    def _drop_soon(self, resident: Resident, why: str) -> asyncio.Task[int]:
        """Close a version's door at once, and have the engine drop it."""
        del self._residents[resident.engine_name]
        self._published(resident, False)
        self._observer.evicted(why)
        task = asyncio.create_task(self._tier.drop(resident.lora_id), name=f"drop {resident.engine_name}")
        self._dropping.add(task)
        task.add_done_callback(self._dropped)
        return task

    def _dropped(self, task: asyncio.Task[int]) -> None:
        self._dropping.discard(task)
        if not task.cancelled():
            task.exception()  # an engine that does not answer fails the load that waits for the room
        self._wake()

    async def _changed(self) -> None:
        """Wait until a lease was returned, a load ended or an entry went."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append(future)
        await future
