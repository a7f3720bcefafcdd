"""Which trained modules a config does not select, by PEFT's own reading of `target_modules` and `layers_to_transform`.

A regular expression comes from a stranger, and PEFT matches it with Python's backtracking engine, so the same pattern
has to be matched by the same engine without the chance to hold it up: one whose shape shows that it is cheap is matched
here, any other in a process of its own with a limit on time and memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping

from manylora.adapter import shown
from manylora.errors import InvalidAdapter
from manylora.peft_config import CONFIG_FILE
from manylora.registry.peft_config import PeftConfig, is_cheap_pattern

ALL_LINEAR = "all-linear"
MAX_REGEX_CHARS = 4096
_CPU_LIMIT_S = 1
_WAIT_LIMIT_S = 20.0
_MEMORY_LIMIT_BYTES = 512 << 20
_BAD_REGEX_STATUS = 3
_MATCHER = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_LIMIT_S}, {_CPU_LIMIT_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY_LIMIT_BYTES}, {_MEMORY_LIMIT_BYTES}))
pattern, paths = json.load(sys.stdin)
try:
    match = re.compile(pattern).fullmatch
except (re.error, OverflowError, RecursionError):
    sys.exit({_BAD_REGEX_STATUS})
json.dump([path for path in paths if match(path)], sys.stdout)
"""


def unselected(config: PeftConfig, layers: Mapping[str, int | None]) -> list[str]:
    """The modules (path to number of the layer) that PEFT would leave out although they are trained."""
    selected = _selected(config.target_modules, layers)
    chosen = config.layers_to_transform
    return [
        path
        for path, layer in layers.items()
        if path not in selected or (chosen is not None and layer is not None and layer not in chosen)
    ]


def _selected(names: tuple[str, ...] | str | None, paths: Collection[str]) -> Collection[str]:
    if names is None or (isinstance(names, str) and names.lower() == ALL_LINEAR):
        return paths
    if isinstance(names, str):
        return set(_fullmatches(names, paths))
    return {path for path in paths if any(path == name or path.endswith(f".{name}") for name in names)}


def _fullmatches(pattern: str, paths: Collection[str]) -> Iterable[str]:
    if len(pattern) > MAX_REGEX_CHARS:
        raise _refusal(pattern, f"give a list of module names, or at most {MAX_REGEX_CHARS} characters")
    if not is_cheap_pattern(pattern):
        return _matched_apart(pattern, paths)
    try:
        match = re.compile(pattern).fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        raise _no_regex(pattern) from error
    return (path for path in paths if match(path))


def _matched_apart(pattern: str, paths: Collection[str]) -> Iterable[str]:
    """Match in a process of its own, which the kernel ends when it takes too long."""
    import subprocess  # late: few adapters need it, and every push would load it

    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    request = json.dumps([pattern, list(paths)])
    try:
        done = subprocess.run(  # noqa: S603 - the program is this module's own, and the pattern is its data
            command, input=request, capture_output=True, text=True, timeout=_WAIT_LIMIT_S, check=False, env={}
        )
    except subprocess.TimeoutExpired as error:
        raise _too_slow(pattern) from error
    if done.returncode == _BAD_REGEX_STATUS:
        raise _no_regex(pattern)
    if done.returncode != 0:
        raise _too_slow(pattern)
    found: list[str] = json.loads(done.stdout)
    return found


def _no_regex(pattern: str) -> InvalidAdapter:
    return _refusal(pattern, f"give a list of module names, a regular expression or '{ALL_LINEAR}'")


def _too_slow(pattern: str) -> InvalidAdapter:
    return _refusal(pattern, "to match it takes too long; give a list of module names, or a simpler regular expression")


def _refusal(pattern: str, remedy: str) -> InvalidAdapter:
    return InvalidAdapter(f"{CONFIG_FILE}: target_modules is '{shown(pattern, 60)}'", remedy)
