"""The engine behind its Unix socket. Owns the connections and what their failures mean; knows no tenant, no alias."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
from yarl import URL

from manylora.gateway.metrics import GatewayMetrics
from manylora.gateway.problems import SERVER_ERROR, Problem, Refusal, engine_unavailable

CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0
MANAGEMENT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024
# The engine closes idle connections after 5 s; ours go first, so that no request meets a connection being closed.
KEEP_ALIVE_S = 3.0
# Larger bodies go out in pieces, as they leave the event loop no time otherwise.
ONE_PIECE_BYTES = 512 * 1024

# The host is never looked up: every connection goes to the socket.
ORIGIN = URL("http://engine")
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")


class EngineClient:
    """Requests to one engine. Belongs to the event loop in which it was made."""

    def __init__(self, socket: Path, silence_timeout_s: float, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._silence_timeout_s = silence_timeout_s
        # Bounded by the number of requests that the gateway admits, not here.
        connector = aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s),
            skip_auto_headers=_AUTO_HEADERS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @contextlib.asynccontextmanager
    async def post(self, url: URL, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; leaving the block before its end cancels it on the engine too.

        Raises `Refusal` when the engine cannot be reached, goes away or falls silent, while reading as well.
        """
        data = body if len(body) <= ONE_PIECE_BYTES else io.BytesIO(body)
        with self._failures():
            async with self._session.post(url, data=data, headers=headers, allow_redirects=False) as response:
                yield response

    async def healthy(self) -> bool:
        """Whether the engine says that it can serve."""
        try:
            async with self._session.get(ORIGIN.with_path("/health"), timeout=_total(PROBE_TIMEOUT_S)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def metrics_text(self) -> tuple[bytes, str]:
        """The engine's own metrics and their content type."""
        with self._failures():
            async with self._session.get(ORIGIN.with_path("/metrics"), timeout=_total(PROBE_TIMEOUT_S)) as response:
                return await response.read(), response.headers.get("content-type", "text/plain")

    async def evict(self, engine_name: str) -> bool:
        """Ask the engine to drop a version from its memory; False where it holds none."""
        body = msgspec.json.encode({"engine_name": engine_name})
        url, timeout = ORIGIN.with_path("/manylora/v1/evict"), _total(MANAGEMENT_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        with self._failures():
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
                return response.status == 200

    async def close(self) -> None:
        await self._session.close()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            # aiohttp's own errors of this kind are both, so this comes first.
            self._metrics.engine_failures.labels("silent").inc()
            message = f"The engine said nothing for {self._silence_timeout_s:g} s."
            raise Refusal(Problem(504, message, SERVER_ERROR, "engine_timeout")) from None
        except aiohttp.ClientConnectorError:
            self._metrics.engine_failures.labels("unreachable").inc()
            raise engine_unavailable() from None
        except (aiohttp.ClientError, OSError):
            self._metrics.engine_failures.labels("broke_off").inc()
            raise engine_unavailable("The engine broke off before the answer was complete.") from None


def _total(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


async def read_answer(response: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The whole body of an answer that is not a stream."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise Refusal(Problem(502, "The engine's answer is too large.", SERVER_ERROR, "bad_engine_answer"))
    return b"".join(parts)
