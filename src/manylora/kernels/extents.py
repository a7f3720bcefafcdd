"""Ranges of a line of places. Pure; knows nothing of what lies there."""

from __future__ import annotations


class Extents:
    """Ranges of a line of `size` places, first fit, neighbours joined."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]

    def take(self, length: int) -> int | None:
        """The start of a free range of `length`, now taken; None where no single range is that long."""
        if length == 0:
            return 0
        for index, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        if length == 0:
            return
        joined: list[tuple[int, int]] = []
        for begin, room in sorted([*self._free, (start, length)]):
            if joined and joined[-1][0] + joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined
