"""The registry from async code: calls run in threads and have a deadline, but for one that may be too short for that.

Owns the threads and the translation of what a database throws; knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from manylora.errors import ManyloraError, Unavailable
from manylora.registry.catalog import Catalog

CALL_TIMEOUT_S = 10.0
SLOW_READ_S = 0.02

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Threads:
    """A few named threads; `call` runs a function in one of them and fails with `Unavailable` after `timeout_s`."""

    def __init__(self, name: str, count: int, timeout_s: float | None = CALL_TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=f"gateway-{name}")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                with _translated(self._name):
                    return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
        except TimeoutError:
            raise Unavailable(f"the {self._name} did not answer within {self._timeout_s} s") from None

    def close(self) -> None:
        """Stop taking work; what runs is left to end by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Drivers have error trees of their own; to a caller all of them mean that `name` cannot be asked now."""
    try:
        yield
    except ManyloraError:
        raise
    except Exception as error:
        raise _unavailable(name, error) from error


def _unavailable(name: str, error: Exception) -> Unavailable:
    """Called where `error` is being handled."""
    logger.exception("a call of the %s failed", name)
    return Unavailable(f"the {name} failed: {type(error).__name__}")


class ChangeWatch:
    """Gives each caller a change number that was read after it asked.

    With `inline`, for a database in a local file, the read takes place in the event loop: it takes some 15 µs, handing
    it to a thread and back some 150 to 300. Should one read ever be slow, all later ones go to a thread. There, callers
    who ask while a read runs share the next one, so a burst of requests costs two reads, not one each; and the thread
    is the watch's own, so that no read waits behind a slow question to the registry.
    """

    def __init__(self, catalog: Catalog, *, inline: bool) -> None:
        self._catalog = catalog
        self._inline = inline
        self._threads = Threads("registry", 1)
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[int] | None = None

    async def seq(self) -> int:
        if self._inline:
            return self._read_here()
        if self._next is None:
            self._next = asyncio.ensure_future(self._read_there())
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)

    def close(self) -> None:
        self._threads.close()

    def _read_here(self) -> int:
        started = time.perf_counter()
        try:
            return self._catalog.change_seq()
        except ManyloraError:
            raise
        except Exception as error:
            raise _unavailable("registry", error) from error
        finally:
            if time.perf_counter() - started > SLOW_READ_S:
                self._inline = False
                logger.warning("the registry was slow; its change number is read in a thread from now on")

    async def _read_there(self) -> int:
        async with self._reading:
            self._next = None  # whoever asks from here on needs a read that has not begun
            return await self._threads.call(self._catalog.change_seq)


def _retrieve(task: asyncio.Task[int]) -> None:
    """Every waiter may have left; the outcome must not be reported as forgotten then."""
    if not task.cancelled():
        task.exception()
