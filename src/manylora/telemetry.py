"""Logs and metrics as every room writes them. Owns the formats; knows nothing of what is logged or counted.

A log line is one JSON object: `time`, `level`, `process`, `logger`, `message`, then the fields given as
`logger.info("…", extra=fields(tenant="acme"))`. Metric names begin with `manylora:`; a label whose values come from
callers goes through `BoundedLabel`, so that no caller can grow the number of series.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

PREFIX = "manylora:"
OTHER = "other"

_encode = msgspec.json.Encoder(enc_hook=str).encode

Field = str | int | float | bool | None


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` of a logging call: `values` become keys of the line; those that are None are left out."""
    return {"manylora_fields": {key: value for key, value in values.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    """One JSON object a line, whatever the message holds."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "manylora_fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def configure_logging(process: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send every logger of this process to `stream` (standard error) as JSON lines; replaces earlier handlers.

    `level` is for our own loggers; libraries are heard from warnings up.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("manylora").setLevel(level)


class BoundedLabel:
    """The first `limit` distinct values of a label keep their name; all later ones count as `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value


class Metrics:
    """The metrics of one process or app, in a registry of their own, so that two apps in a test never collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, what: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(PREFIX + name, what, tuple(labels), registry=self.registry)

    def gauge(self, name: str, what: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(PREFIX + name, what, tuple(labels), registry=self.registry)

    def histogram(self, name: str, what: str, buckets: Iterable[float], labels: Iterable[str] = ()) -> Histogram:
        return Histogram(PREFIX + name, what, tuple(labels), buckets=tuple(buckets), registry=self.registry)

    def exposition(self) -> tuple[bytes, str]:
        """The body and the content type of a scrape."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
