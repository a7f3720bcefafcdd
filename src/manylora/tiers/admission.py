"""Who gets into a tier, who waits, and which busy adapter is drained for those who wait: pure, the clock passed in.

How a front end calls it, all from one thread:

    decision = admission.ask(request, entry, now_s)
        Hit    it is there, or on its way there, and pinned now: go on once it is loaded
        Load   evict `evict` before anything else, then load; afterwards call `loaded` or `failed`
        Wait   nothing can go now; `wake` will name the request
    admission.release(request)     when it ended, was cancelled or gave up waiting; not after `failed` named it
    admission.wake(now_s)          after each `release`, `loaded`, `failed` and `drop`: those who waited and may go now

Rules:

1. An adapter is pinned from the decision to load it, or from a hit, until its requests are released. What is pinned is
   never evicted. So a load serves the requests that it was made for before it can be undone: A evicts B evicts A only
   with a request served between, unless everybody who wanted the adapter has gone.
2. Who waits keeps its place in line, by adapter: all requests for an adapter go together. Until `patience_s` others may
   pass it; after that it is overdue. Free bytes are kept for the eldest overdue, and adapters are *held* until they and
   the free bytes are enough for a group: the overdue from the eldest on that take no more than a share of the tier
   (`drain_share`), the eldest in any case. New requests for a held adapter wait in line like those for an absent one,
   so it is idle once its running requests have ended.
3. Held are idle adapters first, then those least worth keeping. A hold stays until its bytes are used or not needed any
   more, and the latest holds end first: a choice that changed its mind would drain nothing.
4. Whoever comes behind an overdue one takes neither free bytes nor held adapters, only others that are idle.

The bound: let no request hold its adapter, and no load last, longer than D seconds. Then nobody waits longer than

    patience_s + m × D

where m is the number of groups into which the line up to its own adapter falls: 1 for one who waits alone, and at most
its place in line. Proof: let w be overdue at T and in the first group, and call N the bytes of those that wait up to w.
Free bytes and what is held by T are at least N, for all that is in the tier may be held. This stays so: whoever goes
before w takes as much from N as from memory, whoever comes behind takes nothing (rule 4), and holds end from the latest
(rule 3). By T + D all that was held at T is idle, so everybody up to w has gone. With the first group gone by T + D,
the second has gone by T + 2 D, and so on. Requests of a held adapter came after those that it is held for, and wait in
the same line; nobody enters it before somebody who is in it. No timer is needed: holds are brought up to date before
any request is let in.

Groups are small on purpose. With all memory held for all overdue, a tier whose running requests fill it serves in
convoys, and those who could share a hot adapter wait too (docs/performance.md).

Sizes are upper bounds that are known when a request comes; they are counted as given.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from manylora.errors import InvalidInput
from manylora.tiers.eviction import Entry, Policy, fewest

DRAIN_SHARE = 0.125
"""Share of a tier that is drained at a time for those who are overdue."""

PATIENCE_S = 5.0
"""How long a request waits before busy adapters are drained for it."""


class TooLarge(InvalidInput):
    """The adapter alone is larger than the whole tier: waiting cannot help."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The adapter is in the tier or on its way; these requests have it pinned."""

    key: str
    requests: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Evict, then load: these requests have the adapter pinned, and its bytes are taken."""

    key: str
    requests: tuple[Hashable, ...]
    evict: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can go for it now."""

    key: str


@dataclass(slots=True)
class _Resident:
    entry: Entry
    requests: set[Hashable]
    is_loading: bool = True


@dataclass(slots=True)
class _Waiter:
    """An adapter in line, and who waits for it; it keeps its place as long as anybody does."""

    entry: Entry
    since_s: float
    requests: dict[Hashable, None] = field(default_factory=dict)


class Admission:
    """The account of one tier of `budget_bytes`."""

    def __init__(
        self, policy: Policy, budget_bytes: int, *, patience_s: float = PATIENCE_S, drain_share: float = DRAIN_SHARE
    ) -> None:
        assert budget_bytes > 0
        assert patience_s >= 0
        assert 0 <= drain_share <= 1
        self.budget_bytes, self.patience_s, self.drain_share = budget_bytes, patience_s, drain_share
        self._policy = policy
        self._residents: dict[str, _Resident] = {}
        self._keys: dict[Hashable, str] = {}
        self._waiting: dict[str, _Waiter] = {}  # in the order of their coming
        self._held: dict[str, int] = {}  # bytes, in the order of holding
        self._idle: dict[str, int] = {}  # bytes of those that nobody has pinned
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no adapter has, loading ones included."""
        return self.budget_bytes - self._used_bytes

    def is_resident(self, key: str) -> bool:
        """Whether the adapter is in the tier, all of it."""
        resident = self._residents.get(key)
        return resident is not None and not resident.is_loading

    def residents(self) -> list[Entry]:
        """What is in the tier or on its way there."""
        return [resident.entry for resident in self._residents.values()]

    def line(self) -> list[Entry]:
        """The adapters that wait, eldest first."""
        return [waiter.entry for waiter in self._waiting.values()]

    def pinned(self) -> set[str]:
        """The adapters that may not go: in use, admitted or loading."""
        return self._residents.keys() - self._idle.keys()

    def hold(self, key: str, now_s: float) -> bool:
        """Whether new requests of an adapter must wait, because it is being drained for others."""
        self._extend_holds(now_s)
        return key in self._held

    def ask(self, request: Hashable, entry: Entry, now_s: float) -> Hit | Load | Wait:
        """A request came. Raises `TooLarge` where it can never be served; then it is not in the account."""
        assert request not in self._keys, "a request asks once"
        if entry.size_bytes > self.budget_bytes:
            raise TooLarge(
                f"{entry.key} takes {entry.size_bytes} bytes, and adapter memory has {self.budget_bytes}",
                "raise --adapter-memory",
            )
        self._extend_holds(now_s)
        self._keys[request] = entry.key
        waiter = self._waiting.setdefault(entry.key, _Waiter(entry, now_s))
        waiter.requests[request] = None
        return self._go(waiter, now_s) or Wait(entry.key)

    def wake(self, now_s: float) -> tuple[Hit | Load, ...]:
        """Everybody who waited and may go now, eldest first."""
        gone: list[Hit | Load] = []
        while self._waiting or self._held:
            self._end_holds(now_s)
            self._extend_holds(now_s)
            going = [decision for w in list(self._waiting.values()) if (decision := self._go(w, now_s))]
            gone += going
            if not going:
                break
        return tuple(gone)

    def release(self, request: Hashable) -> None:
        """A request ended, or waits no longer."""
        key = self._keys.pop(request)
        waiter = self._waiting.get(key)
        if waiter is not None and request in waiter.requests:
            del waiter.requests[request]
            if not waiter.requests:
                del self._waiting[key]
            return
        resident = self._residents[key]
        resident.requests.remove(request)
        self._note_idle(resident)

    def loaded(self, key: str) -> None:
        """A load ended well."""
        resident = self._residents[key]
        assert resident.is_loading
        resident.is_loading = False
        self._note_idle(resident)

    def failed(self, key: str) -> tuple[Hashable, ...]:
        """A load failed: the adapter is not there. The requests that had it pinned are out of the account."""
        resident = self._residents[key]
        assert resident.is_loading
        for request in resident.requests:
            del self._keys[request]
        self._remove(key, evicted=False)
        return tuple(resident.requests)

    def drop(self, key: str) -> bool:
        """Take an idle adapter out because somebody wants it gone; False while it is in use, or not there."""
        if key not in self._idle:
            return False
        self._remove(key, evicted=False)
        return True

    def check_invariants(self) -> None:
        """For tests and for when nothing else is to do."""
        used = sum(resident.entry.size_bytes for resident in self._residents.values())
        assert used == self._used_bytes <= self.budget_bytes
        assert self._held.keys() <= self._residents.keys()
        for key, resident in self._residents.items():
            assert (key in self._idle) == (not resident.requests and not resident.is_loading)
        assert all(waiter.requests for waiter in self._waiting.values())

    def _go(self, waiter: _Waiter, now_s: float) -> Hit | Load | None:
        """Let an adapter's requests in, if that takes nothing from an overdue one before it."""
        key = waiter.entry.key
        is_behind = self._is_behind_overdue(waiter, now_s)
        if key in self._residents:
            if key in self._held and is_behind:
                return None
            self._held.pop(key, None)
            return Hit(key, self._pin(waiter, now_s))
        victims = self._victims(waiter.entry.size_bytes, is_behind, now_s)
        if victims is None:
            return None
        for victim in victims:
            self._remove(victim.key, evicted=True)
        self._place(waiter.entry)
        return Load(key, self._pin(waiter, now_s), tuple(victim.key for victim in victims))

    def _is_behind_overdue(self, waiter: _Waiter, now_s: float) -> bool:
        """The eldest is overdue if anybody is."""
        eldest = next(iter(self._waiting.values()))
        return eldest is not waiter and self._is_overdue(eldest, now_s)

    def _is_overdue(self, waiter: _Waiter, now_s: float) -> bool:
        return now_s >= waiter.since_s + self.patience_s

    def _victims(self, size_bytes: int, is_behind: bool, now_s: float) -> tuple[Entry, ...] | None:
        """Who leaves for a newcomer of this size; None where those who may go are not enough."""
        needed_bytes = size_bytes if is_behind else size_bytes - self.free_bytes
        if needed_bytes > sum(self._idle.values()):
            return None
        idle = self._idle.keys() - self._held.keys() if is_behind else self._idle.keys()
        # One that others wait for goes last: it would only come back.
        ordered = sorted(self._policy.ordered(idle, now_s), key=lambda entry: entry.key in self._waiting)
        return fewest(ordered, needed_bytes)

    def _pin(self, waiter: _Waiter, now_s: float) -> tuple[Hashable, ...]:
        key = waiter.entry.key
        del self._waiting[key]
        self._idle.pop(key, None)
        self._residents[key].requests.update(waiter.requests)
        for _ in waiter.requests:
            self._policy.use(key, now_s)
        return tuple(waiter.requests)

    def _place(self, entry: Entry) -> None:
        self._residents[entry.key] = _Resident(entry, set())
        self._used_bytes += entry.size_bytes
        self._policy.add(entry)

    def _remove(self, key: str, *, evicted: bool) -> None:
        self._used_bytes -= self._residents.pop(key).entry.size_bytes
        self._idle.pop(key, None)
        self._held.pop(key, None)
        self._policy.remove(key, evicted=evicted)

    def _note_idle(self, resident: _Resident) -> None:
        if not resident.requests and not resident.is_loading:
            self._idle[resident.entry.key] = resident.entry.size_bytes

    def _group_bytes(self, now_s: float) -> int:
        """What memory is drained for: the eldest overdue, and those behind as long as the drained share is enough."""
        total = 0
        for waiter in self._waiting.values():
            more = total + waiter.entry.size_bytes
            if not self._is_overdue(waiter, now_s) or (total and more > self.drain_share * self.budget_bytes):
                break
            total = more
        return total

    def _covered_bytes(self) -> int:
        return self.free_bytes + sum(self._held.values())

    def _extend_holds(self, now_s: float) -> None:
        """Hold what the first group lacks."""
        missing_bytes = self._group_bytes(now_s) - self._covered_bytes()
        if missing_bytes <= 0:
            return
        ordered = self._policy.ordered(self._residents.keys() - self._held.keys(), now_s)
        chosen = fewest(sorted(ordered, key=lambda entry: entry.key not in self._idle), missing_bytes)
        assert chosen is not None, "what is held, free and to be held is the whole budget"
        self._held.update((entry.key, entry.size_bytes) for entry in chosen)

    def _end_holds(self, now_s: float) -> None:
        """Let go of the latest holds as long as the others are enough."""
        spare_bytes = self._covered_bytes() - self._group_bytes(now_s)
        for key, size_bytes in reversed(list(self._held.items())):
            if size_bytes > spare_bytes:
                return
            del self._held[key]
            spare_bytes -= size_bytes
