"""Which adapter leaves a tier when another needs its bytes: pure policies, the clock passed in.

A policy keeps what a tier holds (key, bytes, seconds to load it again) and says what each is worth keeping. Victims are
the least worthy of those that may go; nothing is evicted that the newcomer does not need. Using an entry is O(1),
choosing victims sorts all candidates: O(n log n) for a tier of up to a few thousand, about a millisecond.

Who may go, who waits, and for whom a busy adapter is drained is decided in `manylora.tiers.admission`. Standard library
only: this runs inside vLLM's processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_S = 300.0
"""After this long without use, fame counts half."""

REMEMBERED = 8192
"""Adapters whose fame LFU keeps, those that have left included; beyond it the least famous half is forgotten."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An adapter as a tier sees it."""

    key: str
    size_bytes: int
    load_s: float
    """Seconds to bring it into the tier again."""


class Policy(Protocol):
    """What a tier asks of an eviction policy. Times never go back."""

    def add(self, entry: Entry) -> None:
        """The entry takes its place in the tier; `use` follows for each request that it serves."""

    def use(self, key: str, now_s: float) -> None:
        """A request is served by an entry of the tier."""

    def remove(self, key: str, *, evicted: bool) -> None:
        """The entry left: `evicted` for another's sake, or for a reason that says nothing of its worth."""

    def ordered(self, keys: Iterable[str], now_s: float) -> list[Entry]:
        """These entries of the tier, the least worth keeping first. Ties go by name: the order is a function."""

    def victims(self, needed_bytes: int, pinned: AbstractSet[str], now_s: float) -> tuple[Entry, ...] | None:
        """Who must go to free so many bytes; None where all that is not pinned is too little. Changes nothing."""


def fewest(candidates: Sequence[Entry], needed_bytes: int) -> tuple[Entry, ...] | None:
    """The first candidates that free `needed_bytes` together, without those that turn out not to be needed."""
    taken: list[Entry] = []
    freed = 0
    for entry in candidates:
        if freed >= needed_bytes:
            break
        taken.append(entry)
        freed += entry.size_bytes
    if freed < needed_bytes:
        return None
    for entry in reversed(taken[:]):  # the worthiest is spared first
        if freed - entry.size_bytes >= needed_bytes:
            taken.remove(entry)
            freed -= entry.size_bytes
    return tuple(taken)


class _Tier:
    """What the policies share: the entries, and victims in order of worth."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        assert entry.key not in self._entries, f"{entry.key} is there already"
        self._entries[entry.key] = entry

    def remove(self, key: str, *, evicted: bool) -> None:
        del self._entries[key]

    def worth(self, key: str, now_s: float) -> float:
        """What keeping the entry is worth, in a unit of the policy's own."""
        raise NotImplementedError

    def ordered(self, keys: Iterable[str], now_s: float) -> list[Entry]:
        return [self._entries[key] for key in sorted(keys, key=lambda key: (self.worth(key, now_s), key))]

    def victims(self, needed_bytes: int, pinned: AbstractSet[str], now_s: float) -> tuple[Entry, ...] | None:
        return fewest(self.ordered(self._entries.keys() - pinned, now_s), needed_bytes)


class LRU(_Tier):
    """Least recently used. Knows neither bytes nor costs."""

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0
        self._last: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self.use(entry.key, 0.0)

    def use(self, key: str, now_s: float) -> None:
        """Uses are counted rather than timed: two at one moment have an order too."""
        self._uses += 1
        self._last[key] = self._uses

    def remove(self, key: str, *, evicted: bool) -> None:
        super().remove(key, evicted=evicted)
        del self._last[key]

    def worth(self, key: str, now_s: float) -> float:
        return float(self._last[key])


class LFU(_Tier):
    """Least frequently used, where old fame fades: a use counts half after each half-life.

    Fame outlives a stay in the tier, so an adapter that comes back needn't prove itself again.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, remembered: int = REMEMBERED) -> None:
        super().__init__()
        self._half_life_s, self._remembered = half_life_s, remembered
        # log2 of the faded uses, plus the half-lives since 0: all fade alike, so this stays as it is between two uses.
        self._fame: dict[str, float] = {}

    def use(self, key: str, now_s: float) -> None:
        half_lives = now_s / self._half_life_s
        self._fame[key] = half_lives + math.log2(1 + math.exp2(self.worth(key, now_s) - half_lives))
        if len(self._fame) > self._remembered:
            self._forget()

    def worth(self, key: str, now_s: float) -> float:
        return self._fame.get(key, -math.inf)

    def _forget(self) -> None:
        """Forget the least famous half of those that are not here; once in so many uses, so cheap for each."""
        gone = sorted(self._fame.keys() - self._entries.keys(), key=self._fame.__getitem__)
        for key in gone[: len(gone) // 2 + 1]:
            del self._fame[key]


class GDSF(_Tier):
    """GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories HPL-98-69R1, 1998):

        priority = clock + frequency × cost / size

    with the uses of this stay as frequency, seconds to load as cost and bytes as size, set at each use; the clock is
    the highest priority evicted so far. So small, dear and much used entries stay, and fame fades as the clock passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0
        self._uses: dict[str, int] = {}
        self._priority: dict[str, float] = {}

    def add(self, entry: Entry) -> None:
        super().add(entry)
        self._uses[entry.key] = 0
        self._priority[entry.key] = self._clock

    def use(self, key: str, now_s: float) -> None:
        entry = self._entries[key]
        self._uses[key] += 1
        self._priority[key] = self._clock + self._uses[key] * entry.load_s / max(1, entry.size_bytes)

    def remove(self, key: str, *, evicted: bool) -> None:
        super().remove(key, evicted=evicted)
        del self._uses[key]
        priority = self._priority.pop(key)
        if evicted:
            self._clock = max(self._clock, priority)

    def worth(self, key: str, now_s: float) -> float:
        return self._priority[key]


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfu": LFU, "gdsf": GDSF}
"""How each policy is made, by the name that people give it."""

DEFAULT_POLICY = "lfu"
"""The one under which requests wait least, over the traces of docs/performance.md."""
