"""Replays a trace through the very code that decides who leaves and who waits, over two tiers with the disk below.

A request asks adapter memory (VRAM); what is not there is copied from host RAM; what is not there either is read from
disk first, and its host copy stays. Reads and copies each go one after the other at their bandwidth. A request holds
its adapter for the time that its tokens take at a fixed pace: the engine itself is not simulated.

A hit is a request whose adapter was there, all of it, when it came. A reload is a load within `RELOAD_S` of the
eviction of the same adapter from the same tier.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from manylora.errors import InvalidInput
from manylora.tiers.admission import DRAIN_SHARE, PATIENCE_S, Admission, Hit, Load, Wait
from manylora.tiers.eviction import POLICIES, Entry
from manylora.tiers.traces import Request

MIB = 1 << 20
GIB = 1 << 30
RELOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """The machine, and the adapters' sizes. The defaults are a model of 8 billion parameters, all linears, 16 bits."""

    adapter_memory_bytes: int = 16 * GIB
    host_memory_bytes: int = 64 * GIB
    lora_ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Given to the adapters in turn, in the order of their names."""
    bytes_per_lora_rank: int = 5 * MIB
    host_bytes_per_s: float = 20.0 * GIB
    """From host RAM to VRAM."""
    disk_bytes_per_s: float = 2.0 * GIB
    """From disk to host RAM, checks and packing included."""
    copy_latency_s: float = 0.002
    read_latency_s: float = 0.02
    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 60.0
    """Of one stream."""
    patience_s: float = PATIENCE_S
    drain_share: float = DRAIN_SHARE

    def copy_s(self, size_bytes: int) -> float:
        """From host RAM to VRAM, with nothing else on the way."""
        return self.copy_latency_s + size_bytes / self.host_bytes_per_s

    def read_s(self, size_bytes: int) -> float:
        """From disk to host RAM, with nothing else on the way."""
        return self.read_latency_s + size_bytes / self.disk_bytes_per_s

    def busy_s(self, request: Request) -> float:
        """How long a request holds its adapter once it is there."""
        return request.tokens_in / self.prefill_tokens_per_s + request.tokens_out / self.decode_tokens_per_s


@dataclass(slots=True)
class TierOutcome:
    """What happened in one tier."""

    asked: int = 0
    hits: int = 0
    loads: int = 0
    bytes_in: int = 0
    evictions: int = 0
    reloads: int = 0

    @property
    def hit_rate(self) -> float:
        """From 0 to 1."""
        return self.hits / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace."""

    policy: str
    vram: TierOutcome
    host: TierOutcome
    waits_s: Sequence[float] = field(repr=False)
    """Each request's time from its coming until its adapter was in VRAM, sorted."""

    @property
    def mean_s(self) -> float:
        return math.fsum(self.waits_s) / len(self.waits_s)

    def percentile_s(self, share: float) -> float:
        """The wait that this share of the requests did not exceed."""
        return self.waits_s[max(0, math.ceil(share * len(self.waits_s)) - 1)]


def simulate(requests: Sequence[Request], node: Node, policy: str) -> Outcome:
    """Replay a trace, which is in order of time. Raises `InvalidInput` where an adapter fits in no tier."""
    replay = _Replay(requests, node, policy)
    replay.run()
    waits = sorted(replay.waits_s)
    assert len(waits) == len(requests), "everybody is served in the end"
    return Outcome(policy, replay.vram.outcome, replay.host.outcome, waits)


class _Tier:
    """One tier's account, and what is counted of it."""

    def __init__(self, policy: str, budget_bytes: int, node: Node) -> None:
        self.account = Admission(
            POLICIES[policy](), budget_bytes, patience_s=node.patience_s, drain_share=node.drain_share
        )
        self.outcome = TierOutcome()
        self._evicted_s: dict[str, float] = {}

    def ask(self, request: object, entry: Entry, now_s: float) -> Hit | Load | Wait:
        self.outcome.asked += 1
        self.outcome.hits += self.account.is_resident(entry.key) and not self.account.hold(entry.key, now_s)
        return self.account.ask(request, entry, now_s)

    def note(self, load: Load, size_bytes: int, now_s: float) -> None:
        """Count a load and its evictions."""
        self.outcome.loads += 1
        self.outcome.bytes_in += size_bytes
        self.outcome.evictions += len(load.evict)
        self.outcome.reloads += now_s - self._evicted_s.get(load.key, -math.inf) <= RELOAD_S
        self._evicted_s.update((key, now_s) for key in load.evict)


class _Channel:
    """One transfer after the other."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def ends_s(self, now_s: float, takes_s: float) -> float:
        """When a transfer that is asked for now will be through."""
        self._free_s = max(now_s, self._free_s) + takes_s
        return self._free_s


class _Replay:
    """The events of one replay."""

    def __init__(self, requests: Sequence[Request], node: Node, policy: str) -> None:
        self._requests, self._node = requests, node
        self._sizes = adapter_sizes(requests, node)
        self.vram = _Tier(policy, node.adapter_memory_bytes, node)
        self.host = _Tier(policy, node.host_memory_bytes, node)
        self._disk, self._link = _Channel(), _Channel()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arriving: dict[str, list[int]] = defaultdict(list)  # those whose adapter is on its way
        self._now_s = 0.0
        self.waits_s: list[float] = []

    def run(self) -> None:
        if self._requests:
            self._at(self._requests[0].time, partial(self._arrive, 0))
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, index: int) -> None:
        if index + 1 < len(self._requests):
            self._at(self._requests[index + 1].time, partial(self._arrive, index + 1))
        key = self._requests[index].key
        entry = Entry(key, self._sizes[key], self._node.copy_s(self._sizes[key]))
        self._follow(self.vram.ask(index, entry, self._now_s))

    def _follow(self, decision: Hit | Load | Wait) -> None:
        """Do what adapter memory's account says."""
        if isinstance(decision, Wait):
            return
        self._arriving[decision.key] += [index for index in decision.requests if isinstance(index, int)]
        if isinstance(decision, Load):
            self.vram.note(decision, self._sizes[decision.key], self._now_s)
            self._stage(decision.key)
        elif self.vram.account.is_resident(decision.key):
            self._start(decision.key)

    def _stage(self, key: str) -> None:
        """See that host RAM has the adapter, then copy it."""
        entry = Entry(key, self._sizes[key], self._node.read_s(self._sizes[key]))
        self._follow_host(self.host.ask(key, entry, self._now_s))

    def _follow_host(self, decision: Hit | Load | Wait) -> None:
        key = decision.key
        if isinstance(decision, Load):
            self.host.note(decision, self._sizes[key], self._now_s)
            self._at(self._disk.ends_s(self._now_s, self._node.read_s(self._sizes[key])), partial(self._read, key))
        elif isinstance(decision, Hit):
            self._copy(key)

    def _read(self, key: str) -> None:
        self.host.account.loaded(key)
        self._copy(key)

    def _copy(self, key: str) -> None:
        self._at(self._link.ends_s(self._now_s, self._node.copy_s(self._sizes[key])), partial(self._copied, key))

    def _copied(self, key: str) -> None:
        self.host.account.release(key)
        for decision in self.host.account.wake(self._now_s):
            self._follow_host(decision)
        self.vram.account.loaded(key)
        self._start(key)

    def _start(self, key: str) -> None:
        for index in self._arriving.pop(key, ()):
            self.waits_s.append(self._now_s - self._requests[index].time)
            self._at(self._now_s + self._node.busy_s(self._requests[index]), partial(self._end, index))

    def _end(self, index: int) -> None:
        self.vram.account.release(index)
        for decision in self.vram.account.wake(self._now_s):
            self._follow(decision)


def adapter_sizes(requests: Sequence[Request], node: Node) -> dict[str, int]:
    """Bytes of each adapter of a trace: the ranks go round over their sorted names."""
    ranks = itertools.cycle(node.lora_ranks)
    sizes = {key: next(ranks) * node.bytes_per_lora_rank for key in sorted({request.key for request in requests})}
    smallest = min(node.adapter_memory_bytes, node.host_memory_bytes)
    if sizes and max(sizes.values()) > smallest:
        raise InvalidInput(
            f"an adapter of {max(sizes.values())} bytes does not fit in a tier of {smallest}",
            "raise --adapter-memory and --host-memory, or lower --rank",
        )
    return sizes
