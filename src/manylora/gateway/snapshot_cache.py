"""Facts that hold as long as the registry has not changed. Pure; knows nothing of what it keeps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SnapshotCache(Generic[K, V]):
    """At most `limit` facts, least recently used out first, all of one change number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seq: int | None = None
        self._facts: OrderedDict[K, V] = OrderedDict()

    def get(self, seq: int, key: K) -> V | None:
        """The fact kept under `key` if it was learnt at `seq`; another number forgets everything."""
        if seq != self._seq:
            self._facts.clear()
            self._seq = seq
        fact = self._facts.get(key)
        if fact is not None:
            self._facts.move_to_end(key)
        return fact

    def put(self, seq: int, key: K, fact: V) -> None:
        """Keep a fact that was asked for after `seq` was read; dropped if the registry has changed meanwhile."""
        if seq != self._seq:
            return
        self._facts[key] = fact
        if len(self._facts) > self._limit:
            self._facts.popitem(last=False)
