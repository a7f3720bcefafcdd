"""Long streams whose tokens are timed by a process that does nothing else, so that gaps are the server's."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any, Self

from harness import watch_stream
from harness.asking import Question, request_fields
from harness.stack import Stack


def stream_body(asked: Question, tokens: int) -> dict[str, Any]:
    """The body of a request that streams so many tokens, whatever they are."""
    return {**request_fields(asked), "stream": True, "max_tokens": tokens, "ignore_eos": True}


class TokenWatch:
    """Streams, one a body, from the beginning of the block; they are cut at its end."""

    def __init__(self, stack: Stack, bodies: Sequence[dict[str, Any]]) -> None:
        self.arrivals: list[list[float]] = [[] for _ in bodies]
        self._order = {"port": stack.port, "key": stack.key, "bodies": list(bodies)}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, watch_stream.__file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._order).encode())
        self._process.stdin.write_eof()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._reading
        await self._process.wait()

    async def more(self, tokens: int) -> None:
        """Wait until `tokens` more have come on each stream."""
        targets = [len(arrivals) + tokens for arrivals in self.arrivals]
        while any(len(got) < target for got, target in zip(self.arrivals, targets, strict=True)):
            assert not self._reading.done(), f"the streams ended after {list(map(len, self.arrivals))} tokens"
            await asyncio.sleep(0.02)

    def gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between tokens of one stream, of all streams, within an interval of monotonic time."""
        return [
            after - before
            for arrivals in self.arrivals
            for before, after in itertools.pairwise(arrivals)
            if began <= before and after <= ended
        ]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, at = line.split()
            self.arrivals[int(number)].append(float(at))
