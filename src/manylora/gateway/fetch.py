"""Versions brought to the disk tier before the engine is asked for them. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from manylora.errors import Unavailable
from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.registry_threads import Threads
from manylora.registry.catalog import Catalog
from manylora.tiers.disk import DiskTier

REMEMBERED = 65536
PARALLEL_FETCHES = 4


class Fetcher:
    """One fetch a digest, however many requests wait for it; a request that leaves does not stop it for the others."""

    def __init__(self, catalog: Catalog, disk_tier: DiskTier, metrics: GatewayMetrics, timeout_s: float) -> None:
        self._catalog = catalog
        self._disk_tier = disk_tier
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._threads = Threads("object store", PARALLEL_FETCHES, timeout_s=None)
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._on_disk: OrderedDict[str, None] = OrderedDict()

    async def ensure(self, digest: str) -> None:
        """Return once the files are on disk; raises what the registry or the disk raised, or `Unavailable`."""
        if digest in self._on_disk:
            return
        flight = self._flights.get(digest)
        if flight is None:
            flight = self._flights[digest] = asyncio.ensure_future(self._fetch(digest))
            flight.add_done_callback(lambda done: self._landed(digest, done))
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(flight)
        except TimeoutError:
            raise Unavailable("the object store is slow; the adapter is still being fetched") from None

    def forget(self, digest: str) -> None:
        """The engine did not find it: look again next time."""
        self._on_disk.pop(digest, None)

    def close(self) -> None:
        for flight in self._flights.values():
            flight.cancel()
        self._threads.close()

    async def _fetch(self, digest: str) -> None:
        started = time.perf_counter()
        await self._threads.call(self._disk_tier.ensure, digest, lambda folder: self._catalog.download(digest, folder))
        self._metrics.fetch_seconds.observe(time.perf_counter() - started)
        self._on_disk[digest] = None
        if len(self._on_disk) > REMEMBERED:
            self._on_disk.popitem(last=False)

    def _landed(self, digest: str, flight: asyncio.Task[None]) -> None:
        del self._flights[digest]
        if not flight.cancelled() and flight.exception() is not None:
            self._metrics.fetch_failures.inc()
