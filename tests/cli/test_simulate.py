"""`manylora simulate`: traces from a file or made up, in text and JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
MADE_UP = ("simulate", "--generate", "zipf", "--requests", 300, "--adapters", 40)
TIGHT = ("--adapter-memory", "1GiB", "--host-memory", "2GiB")


def test_all_policies_as_a_table(cli: Cli) -> None:
    shown = cli(*MADE_UP, *TIGHT)
    assert shown.code == 0
    first, header, *rows = shown.out.splitlines()
    assert first.startswith("300 requests over ")
    assert header.split()[:3] == ["POLICY", "VRAM", "HITS"]
    assert [row.split()[0] for row in rows] == ["lru", "lfu", "gdsf"]


def test_json(cli: Cli) -> None:
    found = cli(*MADE_UP, *TIGHT, "--policy", "gdsf", "--json").json
    assert found["trace"]["requests"] == 300
    assert 1 < found["trace"]["adapters"] <= 40
    (policy,) = found["policies"]
    assert policy["policy"] == "gdsf"
    assert policy["vram_loads"] - policy["vram_evictions"] > 0
    assert 0 < policy["vram_hit_rate"] < 1
    assert policy["wait_p50_s"] <= policy["wait_p99_s"] <= policy["wait_max_s"]


def test_a_saved_trace_gives_the_same(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    made = cli(*MADE_UP, "--save", file, "--json")
    assert cli("simulate", file, "--json").out == made.out


def test_options_count(cli: Cli) -> None:
    def bytes_of(*flags: object) -> int:
        size: int = cli(*MADE_UP, *flags, "--json").json["trace"]["adapter_bytes"]
        return size

    assert bytes_of("--rank", "16", "--bytes-per-rank", "1MiB") == 16 * bytes_of(
        "--rank", 1, "--bytes-per-rank", "1MiB"
    )
    assert cli(*MADE_UP, "--seed", 1).out != cli(*MADE_UP, "--seed", 2).out
    slow = cli(*MADE_UP, "--disk-bandwidth", "100MiB", "--policy", "lru", "--json").json["policies"][0]
    fast = cli(*MADE_UP, "--disk-bandwidth", "100GiB", "--policy", "lru", "--json").json["policies"][0]
    assert slow["wait_mean_s"] > fast["wait_mean_s"]


def test_a_bad_line_is_two_lines_of_error(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"time": 0}) + "\n")
    outcome = cli("simulate", file)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith(f"error: {file} line 1: has no field 'adapter'\nhint: a line looks like ")


@pytest.mark.parametrize(
    ("args", "code", "what"),
    [
        ((), 3, "there is no trace"),
        (("x", "--generate", "zipf"), 3, "there are two traces"),
        (("x", "--seed", 1), 3, "--seed is for a generated trace"),
        (("x", "--save", "y"), 3, "--save is for a generated trace"),
        (("x",), 4, "the trace x cannot be read"),
        (("--generate", "flat"), 3, "'flat' makes no trace"),
        ((*MADE_UP[1:], "--policy", "fifo"), 3, "'fifo' is no policy"),
        ((*MADE_UP[1:], "--host-memory", "10%"), 3, "--host-memory '10%' is not a size"),
        ((*MADE_UP[1:], "--adapter-memory", "0"), 3, "--adapter-memory '0' is not a size"),
        ((*MADE_UP[1:], "--adapter-memory", "1MiB"), 3, "does not fit in a tier of 1048576"),
        ((*MADE_UP[1:], "--rank", "8,,16"), 3, "--rank '8,,16' cannot be used"),
    ],
)
def test_refusals(cli: Cli, args: tuple[object, ...], code: int, what: str) -> None:
    outcome = cli("simulate", *args)
    assert (outcome.code, outcome.out) == (code, "")
    assert what in outcome.err.splitlines()[0]
