"""One HTTP/1.1 connection to the engine, one request at a time. Owns framing, limits, flow control and silence.

What arrives goes to the reader in the very callback that brought it: no task is woken for a piece of a stream. Knows
nothing of what is asked or answered.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import httptools

# What an answer may consist of beside its body: status line, headers, interim answers, chunk sizes, trailers.
MAX_HEAD_BYTES = 64 * 1024
# Read ahead of a reader that has not come yet, or is slow.
HIGH_WATER_BYTES = 64 * 1024
# Larger requests go out in pieces, as they leave the event loop no time otherwise.
PIECE_BYTES = 256 * 1024

Take = Callable[[bytes], Coroutine[None, None, None] | None]
"""Takes a piece of a body at once; what it returns is awaited before the next piece comes."""


class ConnectionFailed(Exception):
    """The engine did not answer, or not to the end."""


class BrokeOff(ConnectionFailed):
    """The connection ended, or what came on it is no HTTP answer."""


class Unsent(BrokeOff):
    """A connection that had been idle turned out to be closed before the engine had read the whole request."""


class Silent(ConnectionFailed):
    """Nothing came for too long."""


class EngineConnection(asyncio.Protocol):
    """A connection; `open` makes it. `send`, `head`, then `each` for every request, and `close` unless `reusable`."""

    def __init__(
        self, connected: socket.socket, silence_timeout_s: float, at_close: Callable[[EngineConnection], None]
    ) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._silence_timeout_s = silence_timeout_s
        self._at_close = at_close
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # the parser calls it: no frame of ours for a chunk
        self._parser: Any = httptools.HttpResponseParser(self)
        self.closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._requests = 0
        self._busy = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.content_type = ""
        self.content_length: int | None = None
        self._has_head = self._complete = self._keeps_alive = self._chunked = False
        self._interim = self._surplus = self._eof = False
        self._sent = self._heard_any = False
        self._overhead_bytes = self._body_parts = self._early_bytes = 0
        self._early: list[bytes] = []
        self._take: Take | None = None
        self._waiting: Awaitable[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._read_paused = self._write_paused = False

    # ---- what the client does

    @classmethod
    async def open(
        cls, connected: socket.socket, silence_timeout_s: float, at_close: Callable[[EngineConnection], None]
    ) -> EngineConnection:
        loop = asyncio.get_running_loop()
        connection = cls(connected, silence_timeout_s, at_close)
        await loop.create_unix_connection(lambda: connection, sock=connected)
        return connection

    async def send(self, head: bytes, body: bytes) -> None:
        """Write a request; an answer that comes before its end ends the writing."""
        self._reset()
        self._busy = True
        self._requests += 1
        self._heard = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence_timeout_s, self._check_silence)
        if self.closed:
            self._failure = BrokeOff()
        elif len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
            self._sent = True
        else:
            await self._send_pieces(head, memoryview(body))

    async def _send_pieces(self, head: bytes, body: memoryview) -> None:
        self._transport.write(head)
        for start in range(0, len(body), PIECE_BYTES):
            await asyncio.sleep(0)
            while self._write_paused and self._failure is None and not self._has_head:
                await self._turn()
            if self._failure is not None or self._has_head:
                return
            self._heard = self._loop.time()
            self._transport.write(body[start : start + PIECE_BYTES])
        self._sent = True

    async def head(self) -> None:
        """Wait for the status and the headers of the answer."""
        while not self._has_head:
            if self._failure is not None:
                raise self._failure
            await self._turn()

    async def each(self, take: Take) -> None:
        """Hand the body to `take`, piece by piece, as it comes; returns at its end. Errors of `take` are raised."""
        while True:
            waiting, self._waiting = self._waiting, None
            if waiting is None and self._early:
                piece = b"".join(self._early)
                self._early.clear()
                self._early_bytes = 0
                waiting = take(piece)
            if waiting is not None:
                await waiting
            elif self._failure is not None:
                raise self._failure
            elif self._complete:
                return
            else:
                self._resume_reading()
                self._take = take
                await self._turn()

    @property
    def is_event_stream(self) -> bool:
        return self.content_type.partition(";")[0].strip().lower() == "text/event-stream"

    @property
    def usable(self) -> bool:
        """Whether a request may go out on an idle connection: it is open, and nothing came unasked."""
        if self.closed or self._transport.is_closing():
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def release(self) -> bool:
        """The request is over. Whether the connection can take another; it is closed otherwise."""
        self._busy = False
        if isinstance(self._waiting, Coroutine):
            self._waiting.close()
        self._take = self._waiting = None
        clean = self._complete and self._keeps_alive and self._sent and not self._surplus
        if clean and not self.closed and self._failure is None and not self._transport.get_write_buffer_size():
            self._resume_reading()
            return True
        self.close()
        return False

    def close(self) -> None:
        """Drop the connection at once; this is how the engine learns that nobody waits for its answer."""
        if not self.closed:
            self._transport.abort()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        unasked = not self._busy or self._complete
        if unasked:
            self._surplus = True
            self.close()
            return
        self._heard_any = True
        self._heard = self._loop.time()
        broken = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            broken = True
        parts = self._parts
        if self._complete:
            del parts[self._body_parts :]
        if parts:
            self._overhead_bytes = 0
            piece = parts.pop() if len(parts) == 1 else self._joined()
            if self._take is None:
                self._keep(piece)
            else:
                try:
                    self._waiting = self._take(piece)
                except Exception as error:  # it is the reader's own, and raised where it waits
                    self._fail(error)
                if self._waiting is not None:
                    self._take = None
                    self._pause_reading()
                    self._notify()
        else:
            self._overhead_bytes += len(data)
        if self._complete:
            self._surplus = self._surplus or broken
            self._notify()
        elif broken or (self._overhead_bytes > MAX_HEAD_BYTES):
            self._fail(BrokeOff())
        elif self._has_head and self._take is None:
            self._notify()

    def eof_received(self) -> None:
        """The end of the body where nothing else tells it; `connection_lost` follows."""
        self._eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._busy and not self._complete:
            if self._has_head and self._eof and self.content_length is None and not self._chunked:
                self._complete = True
            else:
                # On a Unix socket both errors mean that the other end closed with a part of ours unread or unsent.
                unread = isinstance(exc, (BrokenPipeError, ConnectionResetError))
                unsent = unread and self._requests > 1 and not self._heard_any
                self._failure = self._failure or (Unsent() if unsent else BrokeOff())
            self._notify()
        self._at_close(self)
        del self._parser, self.on_body

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._notify()

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._overhead_bytes += len(name) + len(value)
        if self._overhead_bytes > MAX_HEAD_BYTES:
            raise BrokeOff
        if self._has_head:
            return  # a trailer
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name == b"content-length":
            self.content_length = int(value)
        elif name == b"transfer-encoding":
            self._chunked = value.rpartition(b",")[2].strip().lower() == b"chunked"

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if not self._interim:
            self.status = status
            self._keeps_alive = self._parser.should_keep_alive()
            self._has_head = True
            self._overhead_bytes = 0

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            self.content_type, self.content_length, self._chunked = "", None, False
        elif not self._complete:
            self._complete = True
            self._body_parts = len(self._parts)

    # ---- between them

    def _keep(self, piece: bytes) -> None:
        """Nobody reads at the moment."""
        self._early.append(piece)
        self._early_bytes += len(piece)
        if self._early_bytes > HIGH_WATER_BYTES:
            self._pause_reading()

    def _joined(self) -> bytes:
        piece = b"".join(self._parts)
        self._parts.clear()
        return piece

    async def _turn(self) -> None:
        """Wait until something has happened that the client must see to."""
        self._wake = self._loop.create_future()
        try:
            await self._wake
        finally:
            self._wake = self._take = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self._notify()
        self.close()

    def _pause_reading(self) -> None:
        if not self._read_paused and not self.closed:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and not self.closed:
            self._read_paused = False
            self._heard = self._loop.time()
            self._transport.resume_reading()

    def _check_silence(self) -> None:
        """The one timer: set again for what is left, so that no piece of an answer has to move it."""
        self._timer = None
        if not self._busy or self._complete:
            return
        left = self._silence_timeout_s
        if not self._read_paused:
            left += self._heard - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            self._fail(Silent())
