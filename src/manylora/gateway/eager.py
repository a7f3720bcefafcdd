"""Coroutines run at once up to where they first wait. Most calls of ASGI's `send` and `receive` never wait at all:
they need no timer and no task then, and can be made from a callback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """A coroutine that could not end at once. Await it in a task, or close it."""

    __slots__ = ("_work", "_yielded")

    def __init__(self, work: Coroutine[Any, Any, T], yielded: Any) -> None:
        self._work = work
        self._yielded = yielded

    def __await__(self) -> Generator[Any, Any, T]:
        yielded = self._yielded
        try:
            while True:
                try:
                    value = yield yielded
                except GeneratorExit:
                    raise
                except BaseException as error:  # a cancellation is the coroutine's own to handle
                    yielded = self._work.throw(error)
                else:
                    yielded = self._work.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self._work.close()

    def close(self) -> None:
        self._work.close()


def run_now(call: Awaitable[T]) -> T | Waiting[T]:
    """The result of a coroutine if it has one without waiting, else what is left of it."""
    work: Any = call  # a coroutine, as every ASGI server's functions make
    try:
        yielded = work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return Waiting(work, yielded)
