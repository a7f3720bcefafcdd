"""Traces: what a line may be, and that made-up ones are what they say."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import InvalidInput, NotFound
from manylora.tiers.traces import GENERATORS, InvalidTrace, Recipe, Request, parse_request, read_trace, write_trace

LINE = {"time": 1.5, "tenant": "acme", "adapter": "support", "tokens_in": 3, "tokens_out": 4}


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in LINE.items() if key != name}


def test_a_line() -> None:
    assert parse_request(json.dumps(LINE)) == Request(1.5, "acme", "support", 3, 4)
    assert parse_request(json.dumps(LINE)).key == "acme/support"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps(without("adapter")), "has no field 'adapter'"),
        (json.dumps({**LINE, "rank": 8}), "has an unknown field 'rank'"),
        (json.dumps({**LINE, "time": "now"}), "'time' is not a number of seconds from 0 on"),
        (json.dumps({**LINE, "time": float("nan")}), "'time' is not"),
        (json.dumps({**LINE, "time": -1}), "'time' is not"),
        (json.dumps({**LINE, "time": True}), "'time' is not"),
        (json.dumps({**LINE, "tenant": ""}), "'tenant' is not a name"),
        (json.dumps({**LINE, "adapter": 7}), "'adapter' is not a name"),
        (json.dumps({**LINE, "tokens_in": 1.5}), "'tokens_in' is not a number of tokens"),
        (json.dumps({**LINE, "tokens_out": -1}), "'tokens_out' is not a number of tokens"),
        (json.dumps({**LINE, "tokens_out": False}), "'tokens_out' is not a number of tokens"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{line}\n")
    with pytest.raises(InvalidTrace) as caught:
        read_trace(file)
    assert caught.value.message.startswith(f"{file} line 3: {what}")


def test_requests_are_put_in_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({**LINE, "time": time}) + "\n" for time in (3, 1, 2)))
    assert [request.time for request in read_trace(file)] == [1, 2, 3]


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(NotFound):
        read_trace(tmp_path / "none")
    with pytest.raises(InvalidTrace, match="has no requests"):
        read_trace(tmp_path / "empty")
    with pytest.raises(InvalidTrace, match="not UTF-8"):
        read_trace(tmp_path / "binary")
    with pytest.raises(InvalidInput, match="cannot be written"):
        write_trace(tmp_path / "none" / "trace", [])


@pytest.mark.parametrize("kind", GENERATORS)
def test_what_is_written_is_read_again(kind: str, tmp_path: Path) -> None:
    made = GENERATORS[kind](Recipe(adapters=20, requests=200))
    write_trace(tmp_path / "trace", made)
    assert read_trace(tmp_path / "trace") == made


@pytest.mark.parametrize("kind", GENERATORS)
@given(adapters=st.integers(1, 30), requests=st.integers(1, 200), seed=st.integers(0, 1000))
def test_a_recipe_gives_the_same_trace_with_the_number_asked_for(
    kind: str, adapters: int, requests: int, seed: int
) -> None:
    recipe = Recipe(adapters=adapters, requests=requests, seed=seed)
    made = GENERATORS[kind](recipe)
    assert len(made) == requests
    assert made == GENERATORS[kind](recipe)
    assert made == sorted(made, key=lambda request: request.time)
    assert len({request.key for request in made}) <= adapters


def test_zipf_shares_and_rate() -> None:
    made = GENERATORS["zipf"](Recipe(adapters=100, requests=20_000, rate=50.0, skew=1.0))
    counts = [count for _, count in Counter(request.key for request in made).most_common()]
    assert counts[0] / len(made) == pytest.approx(1 / 5.187, rel=0.05)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.25)
    assert made[-1].time == pytest.approx(400, rel=0.05)


def test_bursts_are_bursts() -> None:
    """Counts in windows of ten seconds vary far more, adapter by adapter, than those of a Poisson process would."""

    def dispersion(kind: str) -> float:
        made = GENERATORS[kind](Recipe(adapters=20, requests=10_000, rate=10.0, skew=0.0))
        windows = Counter((request.key, int(request.time // 10)) for request in made)
        keys = {request.key for request in made}
        counts = [windows[key, window] for key in keys for window in range(int(made[-1].time // 10))]
        return statistics.variance(counts) / statistics.mean(counts)

    assert dispersion("zipf") == pytest.approx(1, abs=0.1)
    assert dispersion("bursty") > 10
