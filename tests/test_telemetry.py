"""The formats of logs and metrics."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from manylora.telemetry import BoundedLabel, JsonFormatter, Metrics, configure_logging, fields


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("manylora").setLevel(logging.NOTSET)


def test_one_json_object_a_line(root_logger: logging.Logger) -> None:
    out = io.StringIO()
    configure_logging("agent", stream=out)
    logging.getLogger("library").info("not shown")
    logging.getLogger("manylora.x").info('odd "text"\n%s', "🦙", extra=fields(tenant="acme", n=1, gone=None))
    logging.getLogger("manylora.x").debug("not shown")
    (text,) = out.getvalue().splitlines()
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "process": "agent", "logger": "manylora.x", "message": 'odd "text"\n🦙',
        "tenant": "acme", "n": 1,
    }  # fmt: skip


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "m", None, (type(error), error, error.__traceback__))
    text = JsonFormatter("p").format(record)
    assert "\n" not in text and "ValueError: broken" in json.loads(text)["exception"]


def test_a_label_cannot_grow_without_bound() -> None:
    label = BoundedLabel(2)
    assert [label(value) for value in "abcabd"] == ["a", "b", "other", "a", "b", "other"]


def test_metrics_have_the_prefix_and_their_own_registry() -> None:
    first, second = Metrics(), Metrics()
    for metrics in (first, second):
        metrics.counter("things", "Things.", ("kind",)).labels("a").inc()
        metrics.gauge("level", "Level.").set(2)
        metrics.histogram("seconds", "Seconds.", (0.1, 1.0)).observe(0.5)
    body, content_type = first.exposition()
    assert b'manylora:things_total{kind="a"} 1.0' in body and b"manylora:level 2.0" in body
    assert b'manylora:seconds_bucket{le="1.0"} 1.0' in body
    assert content_type.startswith("text/plain")
