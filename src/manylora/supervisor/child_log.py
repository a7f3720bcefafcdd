"""What a child wrote to its log: its last meaningful line while it starts, its tail and a hint when it failed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

_TAIL_BYTES = 64 * 1024
_KEEP_BYTES = 16 * 1024 * 1024
_LINE_MAX_CHARS = 160

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS_PREFIX = re.compile(r"^\([\w ,=:.-]+\)\s*")
_LEVEL_PREFIX = re.compile(r"^(?:DEBUG|INFO|WARNING|ERROR)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+(?:\[[^\]]+\]\s*)?")
_CAUSE = re.compile(r"^(?:\w+\.)*(?:\w*(?:Error|Exception)|\S+: error): (?!Engine core initialization failed)\S")
_LETTERS = re.compile(r"[A-Za-z]{3}")

_HINTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"No module named '?vllm\b"),
        "install the engine: pip install 'manylora[gpu]', or 'manylora[cpu]' where there is no GPU",
    ),
    (
        re.compile(r"unrecognized arguments?|invalid choice|the following arguments are required|argument --"),
        "a flag after `--` was not accepted; `vllm serve --help=all` lists them",
    ),
    (
        re.compile(r"out of memory|OutOfMemory|No available memory for the cache blocks|Cannot allocate memory", re.I),
        "not enough memory: try `-- --max-model-len N` with a smaller N, or another `--gpu-memory-utilization`",
    ),
    (
        re.compile(r"Can't load the configuration|not a valid model identifier|RepositoryNotFound|LocalEntryNotFound"),
        "check MODEL: a local folder with config.json, or the id of a model that the hub or its cache has",
    ),
    (re.compile(r"[Aa]ddress already in use"), "another process listens there: stop it, or give another --port"),
    (re.compile(r"untested vLLM|vLLM [\d.]+ (?:is not|has not been) tested"), "install a vLLM version that docs list"),
)


def open_log(path: Path) -> BinaryIO:
    """Open for appending, mode 0600; a log past 16 MiB is first set aside as `<name>.1`."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _KEEP_BYTES:
            path.replace(path.with_name(path.name + ".1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", buffering=0)


def tail(path: Path, *, since: int = 0, lines: int = 20) -> list[str]:
    """The last lines written after byte `since`, without colours."""
    return _read_lines(path, since)[-lines:]


def last_meaningful_line(path: Path, *, since: int = 0) -> str:
    """The newest line with words in it, without its logger's prefix; empty when there is none."""
    for line in reversed(_read_lines(path, since)):
        text = meaning(line)
        if text:
            return text
    return ""


def meaning(line: str) -> str:
    """A log line as a person wants to see it on a progress line: no process, level, time or source; one line."""
    text = _LEVEL_PREFIX.sub("", _PROCESS_PREFIX.sub("", line.strip())).strip()
    return text[:_LINE_MAX_CHARS] if _LETTERS.search(text) else ""


def cause(lines: list[str]) -> str:
    """The newest line that names an error, without the one by which vLLM points at an earlier one; may be empty."""
    return next((text for line in reversed(lines) if _CAUSE.match(text := meaning(line))), "")


def hint_for(lines: list[str], log: Path) -> str:
    """What a person can do about a start that failed with these last lines."""
    text = "\n".join(lines)
    for pattern, hint in _HINTS:
        if pattern.search(text):
            return hint
    return f"the whole log is in {log}"


def _read_lines(path: Path, since: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(since, size), size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    # A progress bar rewrites its line with carriage returns.
    return [line for line in _ANSI.sub("", text).replace("\r", "\n").split("\n") if line.strip()]
