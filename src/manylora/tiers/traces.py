"""Traces of requests: read from JSON lines, or made up from a seed.

One request a line, in any order:

    {"time": 12.5, "tenant": "acme", "adapter": "support", "tokens_in": 180, "tokens_out": 240}

`time` is in seconds from any moment that the trace chooses. Nothing else may stand in a line: a field that the replay
would ignore is refused.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from manylora.errors import InvalidInput, NotFound

ON_S, OFF_S = 30.0, 270.0
"""Mean length of an adapter's bursts, and of the silence between them."""

GAP_CV = 2.0
"""Standard deviation of the gaps within a burst, over their mean; 1 would be a Poisson process."""

_FEWEST_TOKENS, _MOST_TOKENS = 8, 512
_TENANTS = 20
_EXAMPLE = '{"time": 0.5, "tenant": "acme", "adapter": "support", "tokens_in": 180, "tokens_out": 240}'


class InvalidTrace(InvalidInput):
    """A line of a trace that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    time: float
    """Seconds."""
    tenant: str
    adapter: str
    tokens_in: int
    tokens_out: int

    @property
    def key(self) -> str:
        """The adapter's full name."""
        return f"{self.tenant}/{self.adapter}"


def read_trace(path: Path) -> list[Request]:
    """All requests of a file, in order of time. Raises `InvalidTrace` naming the first bad line."""
    try:
        with path.open(encoding="utf-8") as file:
            requests = list(_parsed(file, path))
    except OSError as error:
        raise NotFound(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidTrace(f"{path} is not UTF-8 text", "a trace is JSON lines") from error
    if not requests:
        raise InvalidTrace(f"{path} has no requests", f"a line looks like {_EXAMPLE}")
    return sorted(requests, key=lambda request: request.time)


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write what `read_trace` reads."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(request)) + "\n" for request in requests)
    except OSError as error:
        raise InvalidInput(f"the trace {path} cannot be written: {error.strerror or error}") from error


def _parsed(lines: Iterable[str], path: Path) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield parse_request(line)
            except ValueError as error:
                raise InvalidTrace(f"{path} line {number}: {error}", f"a line looks like {_EXAMPLE}") from error


def parse_request(line: str) -> Request:
    """One line. Raises `ValueError` with what is wrong with it."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    fields = set(Request.__dataclass_fields__)
    for what, names in (("has no", fields - value.keys()), ("has an unknown", value.keys() - fields)):
        if names:
            raise ValueError(f"{what} field {min(names)!r}")
    time = value["time"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < 1e12:
        raise ValueError("'time' is not a number of seconds from 0 on")
    return Request(
        float(time),
        _text(value, "tenant"),
        _text(value, "adapter"),
        _tokens(value, "tokens_in"),
        _tokens(value, "tokens_out"),
    )


def _text(value: dict[str, object], name: str) -> str:
    text = value[name]
    if not isinstance(text, str) or not text:
        raise ValueError(f"'{name}' is not a name")
    return text


def _tokens(value: dict[str, object], name: str) -> int:
    count = value[name]
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10**9:
        raise ValueError(f"'{name}' is not a number of tokens")
    return count


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a made-up trace is like. The same recipe gives the same trace."""

    adapters: int = 500
    requests: int = 20_000
    rate: float = 20.0
    """Requests a second, over all adapters."""
    skew: float = 1.0
    """The k-th adapter is asked for in proportion to 1 / k^skew."""
    seed: int = 42


def zipf(recipe: Recipe) -> list[Request]:
    """A Poisson process, each request for an adapter by lot."""
    chance = random.Random(recipe.seed)  # noqa: S311
    names = _names(recipe.adapters, chance)
    bounds = list(accumulate(_shares(recipe)))
    time, made = 0.0, []
    for _ in range(recipe.requests):
        time += chance.expovariate(recipe.rate)
        made.append(_request(time, chance.choices(names, cum_weights=bounds)[0], chance))
    return made


def bursty(recipe: Recipe) -> list[Request]:
    """Each adapter by turns busy and silent, with exponential lengths.

    Gaps within a burst have a Gamma distribution whose deviation is `GAP_CV` times its mean.
    """
    made: list[Request] = []
    length_s = recipe.requests / recipe.rate
    while len(made) < recipe.requests:  # how many come in a length of time is random
        length_s *= 1.25
        made = _all_bursts(recipe, length_s)
    return made[: recipe.requests]


def _all_bursts(recipe: Recipe, length_s: float) -> list[Request]:
    made: list[Request] = []
    names = _names(recipe.adapters, random.Random(recipe.seed))  # noqa: S311
    for index, (name, share) in enumerate(zip(names, _shares(recipe), strict=True)):
        chance = random.Random(f"{recipe.seed} {index}")  # noqa: S311
        made += [_request(time, name, chance) for time in _bursts(share * recipe.rate, length_s, chance)]
    return sorted(made, key=lambda request: (request.time, request.key))


def _bursts(rate: float, length_s: float, chance: random.Random) -> Iterator[float]:
    """Times of one adapter's requests, `rate` a second in the long run."""
    gap_s = ON_S / (ON_S + OFF_S) / rate
    shape = 1 / GAP_CV**2
    end_s = -chance.uniform(0, OFF_S)  # so that they do not all begin together
    while end_s < length_s:
        time = end_s + chance.expovariate(1 / OFF_S)
        end_s = time + chance.expovariate(1 / ON_S)
        while (time := time + chance.gammavariate(shape, gap_s / shape)) < min(end_s, length_s):
            if time >= 0:
                yield time


def _shares(recipe: Recipe) -> list[float]:
    weights = [math.pow(place, -recipe.skew) for place in range(1, recipe.adapters + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _names(adapters: int, chance: random.Random) -> list[tuple[str, str]]:
    """Tenant and adapter, in an order that says nothing of how much each is used."""
    numbers = list(range(adapters))
    chance.shuffle(numbers)
    return [(f"tenant-{number % _TENANTS:02d}", f"adapter-{number:04d}") for number in numbers]


def _request(time: float, name: Sequence[str], chance: random.Random) -> Request:
    tokens_in, tokens_out = (chance.randint(_FEWEST_TOKENS, _MOST_TOKENS) for _ in range(2))
    return Request(round(time, 6), name[0], name[1], tokens_in, tokens_out)


GENERATORS: dict[str, Callable[[Recipe], list[Request]]] = {"zipf": zipf, "bursty": bursty}
"""The ways to make up a trace, by name."""
