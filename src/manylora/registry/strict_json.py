"""JSON from strangers: one object, no key twice, no NaN or Infinity, no nesting that exhausts the stack."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from manylora.adapter import shown
from manylora.errors import InvalidAdapter

_SAVE_AGAIN = "copy the file again, or save the adapter again with PEFT's save_pretrained"


class _Refused(ValueError):
    """A construct that the standard parser would accept."""


def parse_object(data: bytes, where: str) -> dict[str, object]:
    """Parse one JSON object; `InvalidAdapter` naming `where` for anything else."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError as error:
        raise InvalidAdapter(f"{where} is nested too deeply", _SAVE_AGAIN) from error
    except ValueError as error:  # bad UTF-8 and bad JSON are both ValueErrors
        raise InvalidAdapter(f"{where} is not valid JSON: {shown(str(error), 160)}", _SAVE_AGAIN) from error
    if not isinstance(value, dict):
        raise InvalidAdapter(f"{where} is not a JSON object", _SAVE_AGAIN)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"the key '{shown(key)}' appears twice")
        found[key] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"{text[:20]} is too large a number")
    return value
